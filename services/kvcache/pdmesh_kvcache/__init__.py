"""The pdmesh kvcache service."""
