"""Conversation: OpenAI-form messages become turns and tokens, for any chat template; it never sees cache or model."""
