//! A recorder of metrics, as a service in production has one.

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tonic_rdma_commands::{Context as _, Failure};

/// The upper ends of the buckets of the bridge's histograms, in seconds. The library counts in its own.
const SECONDS: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0,
    3600.0, 86400.0,
];

/// Installs the recorder of this process, with the texts of the library's metrics.
pub(crate) fn install() -> Result<PrometheusHandle, Failure> {
    let recorder = PrometheusBuilder::new().set_buckets(&SECONDS).context("metrics")?.build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).context("metrics")?;
    tonic_rdma::describe_metrics();
    Ok(handle)
}
