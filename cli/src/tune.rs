//! `tune`: measures the cost of eager and rendezvous sends on a device, and shows the threshold between them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tonic_rdma::Config;
use tonic_rdma::unstable::tuner::{Calibration, Times, calibrate};
use tonic_rdma_commands::{Context as _, Failure, output, table, units};
use tonic_rdma_verbs::{Context, DeviceAttributes, FoundDevice};

pub(crate) const HELP: &str = "\
Small writes are eager: they go into buffers that the peer has posted. From a threshold on, writes go by rendezvous: the \
peer reads them. Which way is faster depends on the device. Connections measure it once, at first use, in the background; \
on the software device all writes are eager, and nothing is measured. This command measures a device, and shows the times \
and the choice. RDMA_EAGER_THRESHOLD and RDMA_CHUNK_SIZE set fixed values.";

/// Time for the measurement. Connections measure in the background, in less time.
const BUDGET: Duration = Duration::from_millis(1500);

/// The options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The device, as `tonic-rdma devices` shows it [default: the first usable one]
    #[arg(short, long, value_name = "NAME", env = "RDMA_DEVICE", hide_env = true)]
    device: Option<String>,
    /// Write the values as JSON to this file; without FILE, or with -, to stdout
    #[arg(short = 'J', long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Measures a device, and shows the result.
pub(crate) fn run(options: &TuneOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let json = options.json.as_deref();
    output::check_files(&[("--json", json)])?;
    let context = open(options.device.as_deref())?;
    let DeviceAttributes { name, provider, .. } = context.attributes();
    let calibration = calibrate(&context, &config, BUDGET);
    let calibration = calibration.context(format!("{name} can't be calibrated"))?;
    output::print(&format!("{name} ({provider})\n\n{}\n", to_text(&calibration)), json)?;
    json.map_or(Ok(()), |path| output::write_json(path, &to_json(name, &calibration)))
}

/// Opens the device of this name, or the first usable device.
fn open(name: Option<&str>) -> Result<Arc<dyn Context>, Failure> {
    let found = tonic_rdma_verbs::devices();
    let is_wanted = |device: &&FoundDevice| name.map_or(device.state.is_ok(), |name| device.name == name);
    let Some(FoundDevice { name, .. }) = found.iter().find(is_wanted) else {
        let wanted = name.map_or("usable device".into(), |name| format!("device {name:?}"));
        let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
        return Err(Failure::usage(format!("there is no {wanted}; there are: {}", names.join(", "))));
    };
    let unusable = |error| Failure::usage(format!("device {name:?} can't be used: {error}"));
    tonic_rdma_verbs::open(name).map_err(unusable)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn to_json(device: &str, calibration: &Calibration) -> Value {
    let sizes = calibration.points.iter().map(|point| {
        json!({
            "bytes": point.bytes,
            "eager_us": micros(point.copied.eager),
            "rendezvous_us": micros(point.copied.rendezvous),
            // `null` where a rendezvous from registered memory costs a registration.
            "registered_eager_us": point.registered.map(|times| micros(times.eager)),
            "registered_rendezvous_us": point.registered.map(|times| micros(times.rendezvous)),
        })
    });
    let chunks = calibration.chunks.iter();
    let chunks = chunks.map(|(chunk, time)| json!({ "chunk_bytes": chunk, "rendezvous_us": micros(*time) }));
    json!({
        "device": device,
        "provider": calibration.provider,
        // `null` if no write goes by rendezvous.
        "threshold_bytes": calibration.threshold(),
        "registered_threshold_bytes": calibration.registered_threshold(),
        "chunk_bytes": calibration.chunk(),
        "sizes": sizes.collect::<Value>(),
        "chunks": chunks.collect::<Value>(),
    })
}

fn to_text(calibration: &Calibration) -> String {
    let size = |bytes: usize| units::size(bytes as u64);
    let time = |time| units::micros(micros(time));
    let times = |times: Times| [time(times.eager), time(times.rendezvous), format!("{:.2}", times.ratio())];
    let sizes = calibration.points.iter().map(|point| {
        let registered = point.registered.map_or_else(|| ["-"; 3].map(str::to_owned), times);
        [&[size(point.bytes)], &times(point.copied)[..], &registered].concat()
    });
    let ratio = "rendezvous / eager";
    let headings = ["size", "eager", "rendezvous", ratio, "registered: eager", "rendezvous", ratio];
    let sizes = table::columns(&headings, 0, sizes);
    let chunks = calibration.chunks.iter().map(|(chunk, duration)| vec![size(*chunk), time(*duration)]);
    let chunks = table::columns(&["chunk", "rendezvous of 4 MiB"], 0, chunks);
    let from = |threshold: Option<usize>| threshold.map_or("never".into(), |at| format!("from {}", size(at)));
    format!(
        "{sizes}\n\n{chunks}\n\nchoice: rendezvous {}, from registered memory {}; chunks of {}",
        from(calibration.threshold()),
        from(calibration.registered_threshold()),
        size(calibration.chunk())
    )
}
