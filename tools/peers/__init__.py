"""Other libraries beside gemmcache, timed on the same problems in one run: see `tools/peer_benchmark.py`."""
