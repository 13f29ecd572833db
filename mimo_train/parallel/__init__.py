"""Communication between ranks: devices, process groups, bridges between modules, metric reduction."""
