"""Commands of the `xpress-export` program, one module each."""
