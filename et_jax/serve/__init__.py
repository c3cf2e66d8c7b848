"""The host: what drives a decoder for many callers at once.

    engine -> streams -> replicas -> replica -> queue -> scheduler

`requests` has what callers ask for and get, `sizing`, `preflight` and `device_memory` what will fit.
"""
