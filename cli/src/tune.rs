//! `tune`: measures the cost of eager and rendezvous sends on a device, and shows the threshold between them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tonic_rdma::Config;
use tonic_rdma::unstable::tuner::{Calibration, Point, Tuned, tune};
use tonic_rdma_commands::{Context as _, Failure, output, table, units};
use tonic_rdma_verbs::Context;

pub(crate) const HELP: &str = "\
Small writes are eager: they go into buffers that the peer has posted. From a threshold on, writes go by rendezvous: the \
peer reads them. Which way is faster depends on the device. Connections measure it once, at first use, in the background; \
on the software device all writes are eager, and nothing is measured. This command shows the measured values. They are \
kept in RDMA_TUNE_CACHE, or else in the user's cache directory. RDMA_EAGER_THRESHOLD and RDMA_CHUNK_SIZE set fixed values.";

/// Time for the measurement. Connections measure in the background, in less time.
const BUDGET: Duration = Duration::from_millis(1500);
/// Relative difference below which two times count as equal: about the difference between two measurements on
/// one machine.
const EQUAL: f64 = 0.05;

/// The options of `tune`.
#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// The device, as `tonic-rdma devices` shows it [default: the first usable one]
    #[arg(long, value_name = "NAME", env = "RDMA_DEVICE", hide_env = true)]
    device: Option<String>,
    /// Write the values as JSON to this file; - is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure again, even if there is a calibration on disk
    #[arg(long)]
    fresh: bool,
}

/// Calibrates a device, or shows the stored calibration.
pub(crate) fn run(options: &TuneOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    output::check_files(&[("--json", options.json.as_deref())])?;
    let context = open(options.device.as_deref())?;
    let name = &context.attributes().name;
    let tuned = tune(&context, &config, options.fresh, BUDGET);
    let tuned = tuned.context(format!("{name} can't be calibrated"))?;
    output::print(&format!("{}\n", to_text(&tuned)), options.json.as_deref())?;
    options.json.as_deref().map_or(Ok(()), |path| output::write_json(path, &to_json(&tuned)))
}

/// Opens the device of this name, or the first usable device.
fn open(name: Option<&str>) -> Result<Arc<dyn Context>, Failure> {
    let found = tonic_rdma_verbs::devices();
    let Some(device) =
        found.iter().find(|device| name.map_or(device.state.is_ok(), |name| device.name == name))
    else {
        let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
        return Err(Failure::usage(match name {
            Some(name) => format!("there is no device {name:?}; there are: {}", names.join(", ")),
            None => format!("none of the devices is usable: {}", names.join(", ")),
        }));
    };
    let unusable = |why: &str| Failure::usage(format!("device {:?} can't be used: {why}", device.name));
    device.state.as_ref().map_err(|why| unusable(&why.to_string()))?;
    tonic_rdma_verbs::open(&device.name).map_err(|error| unusable(&error.to_string()))
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns the faster kind of send in a word.
fn better(point: &Point) -> &'static str {
    match point.ratio() {
        ratio if ratio > 1.0 + EQUAL => "eager",
        ratio if ratio < 1.0 - EQUAL => "rendezvous",
        _ => "equal",
    }
}

/// Returns in words which writes go by rendezvous.
fn from(threshold: Option<usize>) -> String {
    threshold.map_or("never".into(), |bytes| format!("from {}", size(bytes)))
}

fn size(bytes: usize) -> String {
    units::size(bytes as u64)
}

/// Returns the choice of threshold and chunk, and its reason, in words.
fn choice(calibration: &Calibration) -> String {
    let (threshold, chunk) = (from(calibration.threshold()), size(calibration.chunk()));
    format!("rendezvous {threshold} ({}); chunks of {chunk}", calibration.reason())
}

fn to_json(Tuned { calibration, from_disk, kept, .. }: &Tuned) -> Value {
    let key = &calibration.key;
    let sizes = calibration.points.iter().map(|point| {
        json!({
            "bytes": point.bytes,
            "eager_us": micros(point.eager),
            "rendezvous_us": micros(point.rendezvous),
            // `null` where a rendezvous from registered memory costs a registration.
            "registered_eager_us": point.registered.map(|times| micros(times.eager)),
            "registered_rendezvous_us": point.registered.map(|times| micros(times.rendezvous)),
            "better": better(point),
        })
    });
    let chunks = calibration.chunks.iter().map(|point| {
        let rendezvous = micros(point.rendezvous);
        json!({ "chunk_bytes": point.chunk, "bytes": point.bytes, "rendezvous_us": rendezvous })
    });
    let mut report = json!({
        "device": key.device,
        "provider": key.provider,
        "driver": key.driver,
        "version": key.version,
        "processor": key.processor,
        "slot_bytes": key.slot_size,
        "origin": if *from_disk { "disk" } else { "measured" },
        // `null` if no write goes by rendezvous.
        "threshold_bytes": calibration.threshold(),
        "registered_threshold_bytes": calibration.registered_threshold(),
        "chunk_bytes": calibration.chunk(),
        "why": choice(calibration),
        "sizes": sizes.collect::<Value>(),
        "chunks": chunks.collect::<Value>(),
    });
    match kept {
        Ok(path) => report["kept"] = path.display().to_string().into(),
        Err(reason) => report["not_kept"] = reason.to_string().into(),
    }
    report
}

fn to_text(Tuned { calibration, from_disk, kept, .. }: &Tuned) -> String {
    let time = |time| units::micros(micros(time));
    let sizes = calibration.points.iter().map(|point| {
        let times = [point.eager, point.rendezvous].map(time);
        let ratio = format!("{:.2}", point.ratio());
        let registered = point.registered.map(|times| [times.eager, times.rendezvous].map(time));
        let registered = registered.unwrap_or_else(|| ["-".into(), "-".into()]);
        [&[size(point.bytes)], &times[..], &[ratio, better(point).to_owned()], &registered].concat()
    });
    let headings = [
        "size",
        "eager",
        "rendezvous",
        "rendezvous / eager",
        "better",
        "eager, registered memory",
        "rendezvous, registered memory",
    ];
    let sizes = table::columns(&headings, 0, sizes);
    let chunks = calibration
        .chunks
        .iter()
        .map(|point| vec![size(point.chunk), size(point.bytes), time(point.rendezvous)]);
    let chunks = table::columns(&["chunk", "message", "rendezvous"], 0, chunks);
    let before = if *from_disk { "measured before (--fresh measures again), " } else { "" };
    let kept = match kept {
        Ok(path) => format!("kept in {}", path.display()),
        Err(reason) => format!("not kept: {reason}"),
    };
    format!(
        "{}\n\n{sizes}\n\n{chunks}\n\nchoice: {}\nfrom registered memory: rendezvous {}\n{before}{kept}",
        calibration.key,
        choice(calibration),
        from(calibration.registered_threshold())
    )
}
