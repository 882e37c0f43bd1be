"""The demo: a real target, its drafter, and a table that a newcomer understands."""
