"""Checkpoints → graphs → bundle. torch is imported by the modules that need it, never by this package itself."""
