"""The CPU engine: the same HTTP surface as SGLang, plain torch inside."""
