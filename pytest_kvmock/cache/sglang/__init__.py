"""SGLang's radix cache."""
