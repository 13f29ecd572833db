"""Files that other libraries read and write: adapters of PEFT."""
