"""Conversations as tokens: tokenizers, chat templates, placeholders."""
