"""Communication between ranks: devices, process groups, bridges between modules, the sum of a step."""
