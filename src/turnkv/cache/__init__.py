"""The cache owns KV memory: pages, extents, segments and views; it never knows messages, policies or how attention is computed."""
