"""The proxy's side of a handoff's world: one request, from its prefill leg to a decode that has its KV, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.handoff_owner import OwnerSide
from support.handoff_state import ENDS, At, Node, Proxy, Rules
from support.search import Step


class ProxySide:
    """What the proxy does, and what arrives there."""

    def __init__(self, rules: Rules, owner: OwnerSide) -> None:
        self.rules, self._owner = rules, owner

    def steps(self, node: Node) -> Iterator[Step]:
        """What it may do by itself."""
        proxy = node.proxy
        if proxy.at in ENDS:
            return
        if (self.rules.early or self.rules.told_ahead) and proxy.at is At.PREFILL and not proxy.leg:
            expected = node._replace(proxy=proxy._replace(leg=1, on="A"))
            yield Step("proxy tells A what to expect", expected.send(("Leg", "A", 1, proxy.epoch)))
        if proxy.at is At.HOLDING and proxy.leg < self.rules.legs:
            leg = proxy.leg + 1
            for name in "AB":
                sent = node._replace(proxy=proxy._replace(at=At.DECODE, leg=leg, on=name))
                yield Step(f"proxy sends leg {leg} to {name}", sent.send(("Leg", name, leg, proxy.epoch)))
        if proxy.live and not self.rules.stock and node.owner is not None and node.epoch == proxy.epoch:
            _, is_alive = self._owner.tell(node, ("renew",))
            if not is_alive:
                yield Step("proxy hears that the offer is over", node._replace(proxy=proxy._replace(live=False)))
        yield Step("proxy's request ends early", self._leave(node, At.GONE))
        if node.faults:
            crashed = self._leave(node, At.CRASHED)
            yield Step("proxy crashes", crashed._replace(faults=node.faults - 1), is_fault=True)
            if proxy.at is At.DECODE:
                given_up = self._leg_failed(node, proxy.leg).send(("AbortLeg", proxy.on, proxy.leg))
                yield Step(f"proxy gives {proxy.on} up", given_up._replace(faults=node.faults - 1), is_fault=True)

    def deliver(self, node: Node, message: tuple[Any, ...]) -> Node:
        """What a message to it does."""
        proxy = node.proxy
        match message:
            case ("Ticket", epoch) if proxy.at is At.PREFILL and proxy.early == "committed":
                return self._let_go(node._replace(proxy=Proxy(at=At.DONE)), Proxy(live=True, epoch=epoch))
            case ("Ticket", epoch) if proxy.at is At.PREFILL and proxy.early == "failed":
                held = proxy._replace(at=At.DECODE, live=True, epoch=epoch, early="")
                return self._leg_failed(node._replace(proxy=held), proxy.leg)
            case ("Ticket", epoch) if proxy.at is At.PREFILL and proxy.leg:
                return node._replace(proxy=proxy._replace(at=At.DECODE, live=True, epoch=epoch))
            case ("Committed", leg) if proxy.at is At.PREFILL and proxy.leg == leg:
                return node._replace(proxy=proxy._replace(early="committed"))
            case ("LegFailed", leg) if proxy.at is At.PREFILL and proxy.leg == leg:
                return node._replace(proxy=proxy._replace(early="failed", on=""))
            case ("Ticket", epoch) if proxy.at is At.PREFILL:
                return node._replace(proxy=proxy._replace(at=At.HOLDING, live=True, epoch=epoch))
            case ("Ticket", epoch) if proxy.at is not At.CRASHED:
                return self._let_go(node, Proxy(live=True, epoch=epoch))
            case ("Committed", leg) if proxy.at is At.DECODE and proxy.leg == leg:
                return self._let_go(node._replace(proxy=Proxy(at=At.DONE)), proxy)
            case ("LegFailed", leg):
                return self._leg_failed(node, leg)
        return node

    def _leave(self, node: Node, at: At) -> Node:
        """Let go of the request; what a crash leaves behind is what the others notice of broken streams."""
        proxy = node.proxy
        left = node._replace(proxy=Proxy(at=at))
        if proxy.at is At.PREFILL:
            left = left.send(("AbortPrefill", 0))
        if proxy.at is At.DECODE or (proxy.at is At.PREFILL and proxy.on):
            left = left.send(("AbortLeg", proxy.on, proxy.leg))
        return self._let_go(left, proxy) if at is At.GONE else left

    def _let_go(self, node: Node, proxy: Proxy) -> Node:
        return node.send(("Release", proxy.epoch)) if proxy.live and not self.rules.stock else node

    def _leg_failed(self, node: Node, leg: int) -> Node:
        """Try another engine while the offer lives, else compute without it."""
        proxy = node.proxy
        if proxy.at is not At.DECODE or proxy.leg != leg:
            return node
        if proxy.live and leg < self.rules.legs:
            return node._replace(proxy=proxy._replace(at=At.HOLDING, on=""))
        return self._let_go(node._replace(proxy=Proxy(at=At.DONE)), proxy)
