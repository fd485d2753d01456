"""The pdmesh proxy service."""
