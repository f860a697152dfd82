"""SGLang's HTTP surface as we serve it ourselves, in front of the embedded engine and of vLLM: requests read and held
to what there is, routes by which weights come, and answers to what is refused."""
