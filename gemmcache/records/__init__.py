"""The database of tuning records."""
