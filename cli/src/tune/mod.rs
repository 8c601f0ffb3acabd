//! `tune`: measures the cost of eager and rendezvous sends on a device, and shows the threshold between them.

mod options;
mod plot;

use std::sync::Arc;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use tonic_rdma::Config;
use tonic_rdma::internal::tuner::{Calibration, ChunkPoint, Origin, Point, Tuned, tune};
use tonic_rdma_commands::{Failure, output, units};
use tonic_rdma_verbs::{self, Context};

pub(crate) use self::options::{HELP, TuneOptions};

/// Time for the measurement. Connections measure in the background, in less time.
const BUDGET: Duration = Duration::from_millis(1500);
/// Relative difference below which two times count as equal: about the difference between two measurements on one
/// machine.
const EQUAL: f64 = 0.05;

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    provider: String,
    driver: String,
    version: String,
    processor: String,
    slot_bytes: u32,
    /// `measured` or `disk`.
    origin: &'static str,
    /// The file in the cache, if the calibration was stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<String>,
    /// The reason why the calibration was not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_kept: Option<String>,
    /// `null` if no write goes by rendezvous.
    threshold_bytes: Option<usize>,
    /// The threshold for writes from registered memory.
    registered_threshold_bytes: Option<usize>,
    chunk_bytes: usize,
    why: String,
    message_us: f64,
    post_us: f64,
    round_trip_us: f64,
    sizes: Vec<Size>,
    chunks: Vec<Chunk>,
}

#[derive(Debug, Serialize)]
struct Size {
    bytes: usize,
    eager_us: f64,
    rendezvous_us: f64,
    copying_us: f64,
    better: &'static str,
}

#[derive(Debug, Serialize)]
struct Chunk {
    chunk_bytes: usize,
    bytes: usize,
    rendezvous_us: f64,
}

/// Calibrates a device, or shows the stored calibration.
pub(crate) fn run(options: &TuneOptions) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    output::check_files(&[("--json", options.json.as_deref()), ("--plot", options.plot.as_deref())])?;
    let context = open(options.device.as_deref())?;
    let name = &context.attributes().name;
    let tuned = tune(&context, &config, options.fresh, BUDGET)
        .map_err(|error| Failure::run(format!("{name} can't be calibrated: {error}")))?;
    let report = Report::new(&tuned);
    output::print(&format!("{}\n", report.to_text()), options.json.as_deref())?;
    if let Some(path) = &options.json {
        output::write_json(path, &report)?;
    }
    if let Some(path) = &options.plot {
        let svg =
            plot::draw(&tuned.calibration).map_err(|error| Failure::run(format!("can't plot: {error}")))?;
        output::write_file(path, &svg)?;
    }
    Ok(())
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

impl Report {
    fn new(tuned: &Tuned) -> Self {
        let Tuned { calibration, origin, kept, .. } = tuned;
        let key = calibration.key();
        let size = |point: &Point| Size {
            bytes: point.bytes,
            eager_us: micros(point.eager),
            rendezvous_us: micros(point.rendezvous),
            copying_us: micros(point.copying),
            better: better(point),
        };
        let chunk = |point: &ChunkPoint| Chunk {
            chunk_bytes: point.chunk,
            bytes: point.bytes,
            rendezvous_us: micros(point.rendezvous),
        };
        Self {
            device: key.device.clone(),
            provider: key.provider.clone(),
            driver: key.driver.clone(),
            version: key.version.clone(),
            processor: key.cpu.clone(),
            slot_bytes: key.slot_size,
            origin: match origin {
                Origin::Measured => "measured",
                Origin::Disk => "disk",
            },
            kept: kept.as_ref().ok().map(|path| path.display().to_string()),
            not_kept: kept.as_ref().err().map(ToString::to_string),
            threshold_bytes: calibration.threshold(),
            registered_threshold_bytes: calibration.registered_threshold(),
            chunk_bytes: calibration.chunk(),
            why: tuned.summary(),
            message_us: micros(calibration.message_cost()),
            post_us: micros(calibration.post_cost()),
            round_trip_us: micros(calibration.round_trip()),
            sizes: calibration.points().iter().map(size).collect(),
            chunks: calibration.chunks().iter().map(chunk).collect(),
        }
    }

    fn to_text(&self) -> String {
        let driver = if self.driver.is_empty() { String::new() } else { format!(", {}", self.driver) };
        let mut text = format!(
            "{} ({}{driver}), {}, tonic-rdma {}, receive buffers of {} bytes\n\n",
            self.device, self.provider, self.processor, self.version, self.slot_bytes
        );
        text.push_str(&format!("{}\n", self.sizes_table()));
        if !self.chunks.is_empty() {
            text.push_str(&format!("\n{}\n", self.chunks_table()));
        }
        text.push_str(&format!(
            "\nsmall messages: {} each (posting {}), {} there and back\n",
            units::micros(self.message_us),
            units::micros(self.post_us),
            units::micros(self.round_trip_us)
        ));
        text.push_str(&format!("\nchoice: {}\n", self.why));
        let registered = self.registered_threshold_bytes;
        text.push_str(&format!(
            "out of registered memory: rendezvous {}\n",
            registered.map_or("never".into(), |bytes| format!("from {}", units::size(bytes as u64)))
        ));
        let kept = match (&self.kept, &self.not_kept) {
            (Some(path), _) => format!("kept in {path}"),
            (None, reason) => format!("not kept: {}", reason.as_deref().unwrap_or("unknown")),
        };
        let before = if self.origin == "disk" { "measured before (--fresh measures again), " } else { "" };
        text.push_str(&format!("{before}{kept}"));
        text
    }

    fn sizes_table(&self) -> Table {
        let mut table =
            table(&["size", "eager", "rendezvous", "of it copying", "rendezvous / eager", "better"]);
        for Size { bytes, eager_us, rendezvous_us, copying_us, better } in &self.sizes {
            table.add_row([
                units::size(*bytes as u64),
                units::micros(*eager_us),
                units::micros(*rendezvous_us),
                units::micros(*copying_us),
                format!("{:.2}", rendezvous_us / eager_us),
                (*better).to_owned(),
            ]);
        }
        align(table)
    }

    fn chunks_table(&self) -> Table {
        let mut table = table(&["chunk", "message", "rendezvous"]);
        for Chunk { chunk_bytes, bytes, rendezvous_us } in &self.chunks {
            let (chunk, bytes) = (units::size(*chunk_bytes as u64), units::size(*bytes as u64));
            table.add_row([chunk, bytes, units::micros(*rendezvous_us)]);
        }
        align(table)
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header.to_vec());
    table
}

fn align(mut table: Table) -> Table {
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// Returns the measured sizes, with both times in microseconds.
fn curve(calibration: &Calibration) -> Vec<(f64, f64, f64)> {
    let point = |point: &Point| (point.bytes as f64, micros(point.eager), micros(point.rendezvous));
    calibration.points().iter().map(point).collect()
}
