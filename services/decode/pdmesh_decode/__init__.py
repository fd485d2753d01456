"""The pdmesh decode service."""
