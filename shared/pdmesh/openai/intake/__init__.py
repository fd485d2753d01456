"""From a body to token requests: everything that can be wrong with a request is found here."""
