"""The version of the package, alone so that build tools can read it without importing anything."""

__version__ = "0.1.0.dev0"
