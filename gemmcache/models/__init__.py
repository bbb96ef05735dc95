"""Problems from model configs, traces and lists."""
