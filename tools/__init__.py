"""What developers and GPU machines run; no part of the package."""
