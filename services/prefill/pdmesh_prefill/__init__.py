"""The pdmesh prefill service."""
