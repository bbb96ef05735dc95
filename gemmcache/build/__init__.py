"""From records to a published bundle."""
