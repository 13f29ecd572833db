"""Pictures and clips: headers and decoding."""
