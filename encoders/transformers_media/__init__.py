"""The image and audio side of any vision-language or audio-language model of `transformers`, as it is."""
