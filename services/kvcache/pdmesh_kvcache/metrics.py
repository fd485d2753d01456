"""Every metric of the kvcache service, in one place."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a hit in memory (tens of microseconds) to a lookup's longest wait.
_LOOKUP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_TRANSFER_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Registers the service's metrics; label values are the enums of the modules that count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pdmesh_kvcache_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pdmesh_kvcache_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"pdmesh_kvcache_{name}", text, buckets=buckets, registry=registry)

        self.registry = registry
        self.layouts = gauge("layouts", "Layouts that have an arena.")
        self.slots = gauge("slots", "Slots of all arenas.")
        self.slots_used = gauge("slots_used", "Slots that hold a block.")
        self.slots_pinned = gauge("slots_pinned", "Slots that lookups keep in place.")
        self.slot_bytes = gauge("slot_bytes", "Bytes of all slots.")
        self.open_lookups = gauge("open_lookups", "Lookups whose hits are pinned.")
        self.queued_stores = gauge("queued_stores", "Stores waiting to be pulled.")
        self.queued_writes = gauge("queued_writes", "Blocks waiting to be written to Redis or Valkey.")
        self.backing_up = gauge("backing_up", "1 while Redis or Valkey answers, else 0; 0 too when none is configured.")
        self.backing_writable = gauge(
            "backing_writable", "1 while Redis or Valkey takes writes, else 0; 0 too while down."
        )

        self.lookups = counter("lookups", "Lookups answered.")
        self.lookup_blocks = counter("lookup_blocks", "Blocks asked for by lookups.")
        self.hits = counter("hits", "Blocks that lookups found, by where.", "source")
        self.lookups_cut = counter("lookups_cut", "Lookups that returned less than there was, by cause.", "reason")
        self.blocks_damaged = counter("damaged_blocks", "Blocks whose bytes changed in memory; discarded.")
        self.values_rejected = counter("values_rejected", "Values in Redis or Valkey that failed a check.", "reason")
        self.evictions = counter("evictions", "Blocks dropped from an arena for others.")

        self.blocks_accepted = counter("store_blocks_accepted", "Blocks that stores queued to be pulled.")
        self.blocks_committed = counter("store_blocks_committed", "Blocks pulled from engines and made visible.")
        self.blocks_dropped = counter("store_blocks_dropped", "Blocks of stores that were not kept.", "reason")
        self.pulls_rerouted = counter(
            "pulls_rerouted",
            "Times a pull from an engine went on over the next connector, by the one before.",
            "connector",
        )
        self.pulled_bytes = counter("pulled_bytes", "Bytes pulled from engines.")

        self.writes = counter("backing_writes", "Blocks written to Redis or Valkey.")
        self.writes_dropped = counter("backing_writes_dropped", "Blocks not written to Redis or Valkey.", "reason")
        self.read_bytes = counter("backing_read_bytes", "Bytes fetched from Redis or Valkey.")
        self.written_bytes = counter("backing_written_bytes", "Bytes written to Redis or Valkey.")
        self.connectors_left_out = counter(
            "connectors_left_out", "Arenas that go without a configured connector, as it did not start.", "connector"
        )
        self.errors = counter("errors", "Failed operations, by what failed.", "kind")

        self.lookup_seconds = histogram("lookup_seconds", "Time to answer a lookup.", _LOOKUP_BUCKETS_S)
        self.store_seconds = histogram("store_seconds", "Time from a store's turn to its end.", _TRANSFER_BUCKETS_S)
        self.fetch_seconds = histogram("backing_fetch_seconds", "Time of a fetch of one batch.", _TRANSFER_BUCKETS_S)
        self.write_seconds = histogram("backing_write_seconds", "Time of a write of one batch.", _TRANSFER_BUCKETS_S)
