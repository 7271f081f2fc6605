"""Adapters: what stands between a distributed model and code that nvdd cannot see into."""
