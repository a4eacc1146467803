"""Fault campaigns: the tests run short ones, ``benchmarks/fault_campaign.py`` the long ones."""
