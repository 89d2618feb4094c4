"""SGLang's LenVM fork: a value model beside the served one guides its sampler. Its counters are SGLang's."""
