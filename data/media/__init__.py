"""Images and clips: headers and decoding."""
