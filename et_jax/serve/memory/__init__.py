"""What fits: `device_memory` says what there is, `preflight` what a model needs of it.

`page_pool` owns the pages of a replica, and `prefix_cache` the cached pages of prompts.
"""
