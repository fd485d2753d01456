"""`python -m pdmesh_kvcache`: run the kvcache service."""

import sys

from pdmesh.lifecycle import run_service
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import check, serve

sys.exit(run_service("kvcache", KVCacheConfig, serve, check=check))
