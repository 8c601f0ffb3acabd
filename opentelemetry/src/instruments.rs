//! The instruments of one side, their attributes, and which methods count under their own name.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::metrics::{Counter, Histogram, MeterProvider};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use tonic::Code;
use tonic_rdma::unstable::CODES;

/// The buckets of durations, in seconds.
#[rustfmt::skip]
const LATENCY: [f64; 41] = [
    0.0, 0.00001, 0.00005, 0.0001, 0.0003, 0.0006, 0.0008, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008,
    0.01, 0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4,
    0.5, 0.65, 0.8, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
];

/// The buckets of sizes, in bytes.
#[rustfmt::skip]
const SIZE: [f64; 14] = [
    0.0, 1024.0, 2048.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0, 67108864.0,
    268435456.0, 1073741824.0, 4294967296.0,
];

type Filter = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// The instruments of a client or a server.
#[derive(Clone)]
pub(crate) struct Instruments {
    started: Counter<u64>,
    durations: Vec<Histogram<f64>>,
    request_bytes: Histogram<u64>,
    response_bytes: Histogram<u64>,
    /// The target of a client.
    target: Option<KeyValue>,
    /// The methods that count under their own name, without a slash at the start.
    pub(crate) methods: HashSet<Arc<str>>,
    /// Says which other methods do so.
    pub(crate) generic: Option<Filter>,
    /// Whether the attributes name the transport.
    pub(crate) names_transport: bool,
}

/// What a call has in common with all calls of its kind: its method, and where it goes.
#[derive(Debug)]
pub(crate) struct CallAttributes {
    method: Value,
    transport: Option<&'static str>,
}

/// The names of the instruments of one side.
struct Names {
    started: &'static str,
    unit: &'static str,
    durations: &'static [&'static str],
    request_bytes: &'static str,
    response_bytes: &'static str,
}

const CLIENT: Names = Names {
    started: "grpc.client.attempt.started",
    unit: "{attempt}",
    durations: &["grpc.client.attempt.duration", "grpc.client.call.duration"],
    request_bytes: "grpc.client.attempt.sent_total_compressed_message_size",
    response_bytes: "grpc.client.attempt.rcvd_total_compressed_message_size",
};

const SERVER: Names = Names {
    started: "grpc.server.call.started",
    unit: "{call}",
    durations: &["grpc.server.call.duration"],
    request_bytes: "grpc.server.call.rcvd_total_compressed_message_size",
    response_bytes: "grpc.server.call.sent_total_compressed_message_size",
};

impl Instruments {
    /// Makes the instruments of a client whose channel has this target.
    pub(crate) fn client(provider: &(impl MeterProvider + ?Sized), target: String) -> Self {
        Self::new(provider, &CLIENT, Some(KeyValue::new("grpc.target", Arc::<str>::from(target))))
    }

    /// Makes the instruments of a server.
    pub(crate) fn server(provider: &(impl MeterProvider + ?Sized)) -> Self {
        Self::new(provider, &SERVER, None)
    }

    fn new(provider: &(impl MeterProvider + ?Sized), names: &Names, target: Option<KeyValue>) -> Self {
        let scope = InstrumentationScope::builder(env!("CARGO_PKG_NAME"));
        let meter = provider.meter_with_scope(scope.with_version(env!("CARGO_PKG_VERSION")).build());
        let seconds = |name: &&'static str| {
            let duration = meter.f64_histogram(*name).with_unit("s").with_boundaries(LATENCY.to_vec());
            duration.with_description("The time from the start of a call to its status.").build()
        };
        let bytes = |name, description| {
            let size = meter.u64_histogram(name).with_unit("By").with_boundaries(SIZE.to_vec());
            size.with_description(description).build()
        };
        let started = meter.u64_counter(names.started).with_unit(names.unit);
        Self {
            started: started.with_description("Calls that were started.").build(),
            durations: names.durations.iter().map(seconds).collect(),
            request_bytes: bytes(
                names.request_bytes,
                "The bytes of the request messages of a call, compressed.",
            ),
            response_bytes: bytes(
                names.response_bytes,
                "The bytes of the response messages of a call, compressed.",
            ),
            target,
            methods: HashSet::new(),
            generic: None,
            names_transport: false,
        }
    }

    /// Returns the attributes of a call to `path`. `registered`: the method is one of generated code.
    pub(crate) fn attributes(
        &self,
        path: &str,
        registered: bool,
        transport: Option<&'static str>,
    ) -> CallAttributes {
        let name = path.strip_prefix('/').unwrap_or(path);
        let generic = || registered || self.generic.as_ref().is_some_and(|generic| generic(name));
        let method = match self.methods.get(name) {
            Some(name) => Value::from(Arc::clone(name)),
            None if generic() => Value::from(Arc::<str>::from(name)),
            None => Value::from("other"),
        };
        CallAttributes { method, transport }
    }

    /// Records the start of a call.
    pub(crate) fn begin(&self, call: &CallAttributes) {
        self.started.add(1, &self.all(call, None));
    }

    /// Records the end of a call.
    pub(crate) fn end(&self, call: &CallAttributes, code: Code, took: Duration, request: u64, response: u64) {
        let attributes = self.all(call, Some(code));
        for duration in &self.durations {
            duration.record(took.as_secs_f64(), &attributes);
        }
        self.request_bytes.record(request, &attributes);
        self.response_bytes.record(response, &attributes);
    }

    fn all(&self, call: &CallAttributes, code: Option<Code>) -> Vec<KeyValue> {
        let mut attributes = Vec::with_capacity(4);
        attributes.push(KeyValue::new("grpc.method", call.method.clone()));
        attributes.extend(self.target.clone());
        attributes.extend(code.map(|code| KeyValue::new("grpc.status", CODES[code as usize])));
        attributes.extend(call.transport.map(|transport| KeyValue::new("tonic_rdma.transport", transport)));
        attributes
    }
}

impl fmt::Debug for Instruments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instruments")
            .field("target", &self.target)
            .field("methods", &self.methods)
            .finish_non_exhaustive()
    }
}
