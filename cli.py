"""The command line from a checkout: `python cli.py build …` with nothing installed but the dependencies."""

import sys

sys.path[1:1] = [f"{sys.path[0]}/engines", f"{sys.path[0]}/runtime"]
sys.exit(__import__("xpress_export.cli.main", fromlist=["main"]).main())
