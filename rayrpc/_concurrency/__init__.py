"""Parts that know no torch, no Ray and no RPC."""
