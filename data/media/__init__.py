"""Images, videos and audio: headers and decoding."""
