"""Conversations and the chat templates that turn them into prompts."""
