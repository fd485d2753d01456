"""From updates to the JSON and the events that clients see."""
