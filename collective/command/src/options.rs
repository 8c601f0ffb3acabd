//! The options of the command, and its choices that have names. Tables and JSON use the same names.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use tonic_rdma_collective::Reduction;
use tonic_rdma_commands::output::Outputs;
use tonic_rdma_commands::units::{SIZE_FORMS, number, parse_size, parse_time};
use tonic_rdma_commands::{
    Failure, List, Named as _, ValueError, name_list, number_list, output, parse_list, parse_set,
};

/// The largest number of local ranks.
pub(crate) const MAX_RANKS: u64 = 64;
/// The largest size of an operand.
const MAX_BYTES: u64 = 4 << 30;
const MAX_ITERATIONS: u64 = 10_000_000;

const SIZES: &str = "8,64,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB";
const QUICK_SIZES: &str = "8,1KiB,64KiB,1MiB";

const HELP: &str = "\
Starts the ranks as local processes. Without --ranks, and started by mpirun, torchrun or srun, this process is one rank. \
Before each iteration the ranks write new content into the next of several buffers; each element of each result is checked. \
Both are outside the timed part. The latency of an iteration is that of the slowest rank. The bus bandwidth is 2(N-1)/N times \
the size over the latency. With several algorithms the iterations take turns. \
The exit status is 0 only if every check held; bad input makes it 2.

Examples:
  tonic-rdma-allreduce --ranks 2,4 --quick                 in a few seconds
  tonic-rdma-allreduce --ranks 4 --sizes 1KiB,1MiB --algorithm auto,one-shot,ring,halving-doubling
  tonic-rdma-allreduce --ranks 2,3,4,8 --tuner-check       the plans beside each algorithm
  tonic-rdma-allreduce --ranks 3 --algorithm ring,naive --counters
  tonic-rdma-allreduce --hosts 2,2 --algorithm ring,hierarchical --counters    bytes across simulated hosts
  mpirun -n 4 tonic-rdma-allreduce --json rows.json";

/// Measures and checks allreduce over RDMA: latency and bus bandwidth by ranks, size, type and algorithm
#[derive(Clone, Debug, Parser)]
#[command(name = "tonic-rdma-allreduce", version, after_long_help = HELP)]
pub(crate) struct Options {
    /// Numbers of local ranks, from 1 to 64 [default: 2]
    #[arg(long, value_name = "LIST", value_parser = number_list::<usize>("number", 1..=MAX_RANKS))]
    pub(crate) ranks: Option<List<usize>>,
    /// Local ranks on each of several simulated hosts, such as 2,2
    ///
    /// Plans take the ranks as those of several hosts; the links stay those of one host. The sum is the number
    /// of ranks.
    #[arg(long, hide_short_help = true, value_name = "LIST", value_parser = hosts)]
    pub(crate) hosts: Option<List<usize>>,
    /// Sizes of the operand: 64, 4k, 1MiB [default: 8 to 64MiB]
    #[arg(short, long, value_name = "LIST", value_parser = sizes)]
    pub(crate) sizes: Option<List<u64>>,
    /// Types of elements, such as f32,bf16
    ///
    /// f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64
    #[arg(long, value_name = "LIST", value_parser = name_list::<Type>("type"), default_value = "f32")]
    pub(crate) types: List<Type>,
    /// Algorithms: auto, one-shot, ring, halving-doubling, hierarchical, naive [default: auto]
    ///
    /// auto is that of the plans. hierarchical reduces within each host first, then across hosts. naive has rank 0
    /// reduce for all.
    #[arg(long, value_name = "LIST", value_parser = name_list::<Algorithm>("algorithm"))]
    pub(crate) algorithm: Option<List<Algorithm>>,
    /// Reduction: sum, mean (of floating-point types), min, max
    #[arg(long, value_name = "NAME", value_parser = reductions(), default_value = "sum")]
    pub(crate) reduction: Reduction,
    /// Memory: registered, registered-out-of-place, slice
    ///
    /// registered works in place. slice takes any memory, works in place and copies.
    #[arg(long, value_name = "LIST", value_parser = name_list::<Operand>("operand"), default_value = "registered")]
    pub(crate) operand: List<Operand>,
    /// Time for each cell, in seconds or with a unit (300ms, 2m) [default: 0.5]
    #[arg(short = 't', long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) duration: Option<Duration>,
    /// Iterations of each cell instead of a duration
    ///
    /// One number, or one for each size.
    #[arg(long, value_name = "LIST", value_parser = iterations(1), conflicts_with = "duration")]
    pub(crate) iterations: Option<List<u64>>,
    /// Iterations before the measured ones
    ///
    /// One number, or one for each size [default: each buffer once, at least 10, above 1MiB 3].
    #[arg(long, hide_short_help = true, value_name = "LIST", value_parser = iterations(0))]
    pub(crate) warm_up: Option<List<u64>>,
    /// Keep each local rank on a core of its own: auto, yes, no
    ///
    /// auto: if there are enough cores. A launcher pins its ranks itself: then yes says that it did.
    #[arg(long, value_name = "WHEN", value_enum, hide_possible_values = true, default_value_t = Pin::Auto)]
    pub(crate) pin: Pin,
    /// Compare the plans with each algorithm at 24 sizes
    ///
    /// Shows the plans too, and checks that they are near the best.
    #[arg(long, conflicts_with_all = ["sizes", "algorithm", "counters"])]
    pub(crate) tuner_check: bool,
    /// Show the bytes that each rank moved and copied
    ///
    /// They stand beside 2(N-1)/N times the size. Those of ring, naive and, with --hosts, hierarchical are checked.
    #[arg(long)]
    pub(crate) counters: bool,
    /// Measure four sizes for 0.1 s each
    #[arg(short, long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) outputs: Outputs,
    /// Write a plot of latency and bus bandwidth to this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// What a rank that this command started must know
    #[arg(long, hide = true)]
    pub(crate) child: Option<String>,
}

/// Whether each rank stays on a core of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pin {
    Auto,
    Yes,
    No,
}

/// The iterations of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Iterations(u64),
    Duration(Duration),
}

/// A cell of the measurement: everything but the number of ranks and the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) bytes: u64,
    pub(crate) kind: Type,
    pub(crate) operand: Operand,
    pub(crate) reduction: Reduction,
    pub(crate) length: Length,
    pub(crate) warm_ups: u64,
}

impl Cell {
    /// Returns the number of elements.
    pub(crate) const fn elements(&self) -> usize {
        (self.bytes / self.kind.bytes()) as usize
    }
}

impl Options {
    /// Checks that the files of the results can be written.
    pub(crate) fn check_files(&self) -> Result<(), Failure> {
        self.outputs.check()?;
        output::check_files(&[("--plot", self.plot.as_deref())])
    }

    /// Returns the numbers of local ranks.
    ///
    /// # Errors
    ///
    /// `--hosts` and `--ranks` have different numbers, or too many.
    pub(crate) fn local_ranks(&self) -> Result<Vec<usize>, Failure> {
        let ranks = self.ranks.as_ref().map(|list| list.0.clone());
        let Some(hosts) = &self.hosts else { return Ok(ranks.unwrap_or_else(|| vec![2])) };
        let sum = hosts.0.iter().sum();
        if ranks.as_ref().is_some_and(|ranks| *ranks != [sum]) {
            return Err(Failure::usage(format!(
                "--hosts has {sum} ranks; leave --ranks out, or give the same number"
            )));
        }
        if sum as u64 > MAX_RANKS {
            return Err(Failure::usage(format!(
                "--hosts has {sum} ranks, and the command starts at most {MAX_RANKS}"
            )));
        }
        Ok(vec![sum])
    }

    /// Returns the simulated host of a local rank.
    pub(crate) fn host(&self, rank: usize) -> Option<usize> {
        let hosts = self.hosts.iter().flat_map(|list| &list.0).enumerate();
        hosts.flat_map(|(host, ranks)| std::iter::repeat_n(host, *ranks)).nth(rank)
    }

    /// Returns the algorithms to measure side by side.
    pub(crate) fn algorithms(&self) -> Vec<Algorithm> {
        if self.tuner_check {
            let all = Algorithm::value_variants().iter().copied();
            all.filter(|algorithm| *algorithm != Algorithm::Naive).collect()
        } else {
            self.algorithm.as_ref().map_or_else(|| vec![Algorithm::Auto], |list| list.0.clone())
        }
    }

    /// Returns the cells to measure with `ranks` ranks.
    ///
    /// # Errors
    ///
    /// Options that contradict one another, by the name of the option.
    pub(crate) fn cells(&self, ranks: usize) -> Result<Vec<Cell>, Failure> {
        let sizes = match &self.sizes {
            // From 8 bytes to 64 MiB.
            _ if self.tuner_check => (0..24).map(|power| 8 << power).collect(),
            Some(list) => list.0.clone(),
            None => default_sizes(self.quick)?,
        };
        let mut cells = Vec::new();
        for kind in &self.types.0 {
            self.check_range(*kind, ranks)?;
            for operand in &self.operand.0 {
                for (index, bytes) in sizes.iter().enumerate() {
                    if !bytes.is_multiple_of(kind.bytes()) {
                        return Err(Failure::usage(format!(
                            "--sizes: {bytes} bytes are no whole number of elements of {} (--types)",
                            kind.name()
                        )));
                    }
                    let length = match &self.iterations {
                        Some(list) => Length::Iterations(each("--iterations", list, index, sizes.len())?),
                        None => Length::Duration(self.duration.unwrap_or(self.usual_duration())),
                    };
                    let warm_ups = match &self.warm_up {
                        Some(list) => each("--warm-up", list, index, sizes.len())?,
                        // The first use of a buffer makes it known to the other ranks, which takes long.
                        None => buffers(*bytes).max(if *bytes <= 1 << 20 { 10 } else { 3 }),
                    };
                    let (bytes, kind, operand) = (*bytes, *kind, *operand);
                    cells.push(Cell { bytes, kind, operand, reduction: self.reduction, length, warm_ups });
                }
            }
        }
        Ok(cells)
    }

    fn usual_duration(&self) -> Duration {
        Duration::from_millis(if self.quick { 100 } else { 500 })
    }

    /// Refuses types whose results could not be checked exactly.
    fn check_range(&self, kind: Type, ranks: usize) -> Result<(), Failure> {
        if self.reduction == Reduction::Mean && !kind.is_float() {
            return Err(Failure::usage(format!(
                "--reduction mean is for floating-point types, not {}",
                kind.name()
            )));
        }
        if values(kind, self.reduction, ranks) < 2 {
            return Err(Failure::usage(format!(
                "--types {}: this type can't hold the {} of {ranks} ranks exactly (--ranks, --reduction)",
                kind.name(),
                self.reduction
            )));
        }
        Ok(())
    }
}

/// Returns how many operands of a size take turns: 64 MiB together, at least 2, at most 16.
pub(crate) fn buffers(bytes: u64) -> u64 {
    ((64 << 20) / bytes.max(1)).clamp(2, 16)
}

/// Returns how many different values the content of a rank may have, so that each result is exact.
pub(crate) fn values(kind: Type, reduction: Reduction, ranks: usize) -> u64 {
    let ranks = ranks.max(1) as u64;
    let most = match reduction {
        Reduction::Sum => kind.exact() / ranks,
        // The values are multiples of the number of ranks.
        Reduction::Mean => kind.exact() / (ranks * ranks),
        _ => kind.exact(),
    };
    most.min(1024)
}

fn default_sizes(quick: bool) -> Result<Vec<u64>, Failure> {
    let text = if quick { QUICK_SIZES } else { SIZES };
    sizes(text).map(|list| list.0).map_err(|error| Failure::run(error.to_string()))
}

/// Returns the value for the size at `index`.
fn each(option: &str, list: &List<u64>, index: usize, sizes: usize) -> Result<u64, Failure> {
    match list.0.as_slice() {
        [one] => Ok(*one),
        several if several.len() == sizes => Ok(several[index]),
        several => {
            let given = several.len();
            Err(Failure::usage(format!(
                "{option} takes one number, or one for each of the {sizes} sizes; it has {given}"
            )))
        }
    }
}

fn reductions() -> impl TypedValueParser<Value = Reduction> {
    let reduction = |name: String| Reduction::all().find(|reduction| reduction.to_string() == name);
    let names = PossibleValuesParser::new(["sum", "mean", "min", "max"]);
    names.try_map(move |name| reduction(name).ok_or("the library has no such reduction"))
}

fn sizes(text: &str) -> Result<List<u64>, ValueError> {
    parse_set(text, size)
}

fn size(text: &str) -> Result<u64, ValueError> {
    match parse_size(text) {
        Ok(bytes) if bytes <= MAX_BYTES => Ok(bytes),
        _ => Err(ValueError::number("size", text, format!("{SIZE_FORMS}, up to 4 GiB"))),
    }
}

/// Reads the numbers of ranks on hosts, the same ones more than once too.
fn hosts(text: &str) -> Result<List<usize>, ValueError> {
    parse_list(text, number("number", 1..=MAX_RANKS))
}

/// Returns the parser of a list of numbers of iterations, the same ones more than once too.
fn iterations(least: u64) -> impl Fn(&str) -> Result<List<u64>, ValueError> + Clone {
    move |text| parse_list(text, number("number", least..=MAX_ITERATIONS))
}

/// An algorithm, or that of the plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Algorithm {
    Auto,
    OneShot,
    HalvingDoubling,
    Ring,
    Hierarchical,
    Naive,
}

impl Algorithm {
    /// Returns the algorithm of the library; `None` for that of the plans.
    pub(crate) fn fixed(self) -> Option<tonic_rdma_collective::Algorithm> {
        tonic_rdma_collective::Algorithm::from_name(self.name())
    }
}

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Type {
    F32,
    F64,
    F16,
    Bf16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
}

impl Type {
    /// Returns the number of bytes of an element, and the number up to which the type holds every whole
    /// number.
    const fn facts(self) -> (u64, u64) {
        match self {
            Self::I8 => (1, i8::MAX as u64),
            Self::U8 => (1, u8::MAX as u64),
            Self::F16 => (2, 1 << 11),
            Self::Bf16 => (2, 1 << 8),
            Self::I16 => (2, i16::MAX as u64),
            Self::U16 => (2, u16::MAX as u64),
            Self::F32 => (4, 1 << 24),
            Self::I32 => (4, i32::MAX as u64),
            Self::U32 => (4, u32::MAX as u64),
            Self::F64 => (8, 1 << 53),
            Self::I64 => (8, i64::MAX as u64),
            Self::U64 => (8, u64::MAX),
        }
    }

    /// Returns the number of bytes of an element.
    pub(crate) const fn bytes(self) -> u64 {
        self.facts().0
    }

    /// Returns the number up to which the type holds every whole number.
    pub(crate) const fn exact(self) -> u64 {
        self.facts().1
    }

    /// Returns whether it is a floating-point type.
    pub(crate) const fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }
}

/// The memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operand {
    /// Registered memory, in place.
    Registered,
    /// Registered memory, with a result elsewhere.
    RegisteredOutOfPlace,
    /// Any memory, in place. The library copies it to registered memory and back.
    Slice,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn of(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from([&["tonic-rdma-allreduce"], arguments].concat())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn errors_name_the_option_and_what_it_accepts() {
        for (option, value, accepted) in [
            ("--ranks", "0", "1 to 64"),
            ("--ranks", "65", "1 to 64"),
            ("--ranks", "2,2", "twice"),
            ("--sizes", "4 lots", "KiB"),
            ("--sizes", "1,", "empty"),
            ("--types", "f8", "bf16"),
            ("--algorithm", "tree", "halving-doubling"),
            ("--hosts", "2,0", "1 to 64"),
            ("--reduction", "product", "sum, mean, min, max"),
            ("--operand", "stack", "registered-out-of-place"),
            ("--duration", "0", "0.001"),
            ("--iterations", "0", "from 1"),
            ("--warm-up", "-1", "from 0"),
            ("--pin", "maybe", "auto"),
        ] {
            let error = of(&[&format!("{option}={value}")]).unwrap_err().to_string();
            assert!(error.contains(option) && error.contains(accepted), "{option} {value}: {error}");
        }
        for options in [
            &["--iterations", "1", "--duration", "1"][..],
            &["--tuner-check", "--sizes", "8"],
            &["--tuner-check", "--algorithm", "ring"],
        ] {
            let error = of(options).unwrap_err().to_string();
            let option = options[0].split('=').next().unwrap();
            assert!(error.contains(option) && error.contains("cannot be used with"), "{error}");
        }
    }

    #[test]
    fn contradictions_name_their_options() {
        for (arguments, words) in [
            (&["--sizes", "4", "--types", "f64"][..], &["--sizes", "4 bytes", "f64"][..]),
            (&["--sizes", "8,16", "--iterations", "1,2,3"], &["--iterations", "2 sizes", "3"]),
            (&["--sizes", "8", "--warm-up", "1,2"], &["--warm-up", "1 sizes"]),
            (&["--types", "i32", "--reduction", "mean"], &["--reduction", "i32"]),
            (&["--types", "bf16", "--reduction", "mean"], &["--types bf16", "16 ranks"]),
        ] {
            let failure = of(arguments).unwrap().cells(16).unwrap_err();
            assert!(failure.is_usage());
            let text = failure.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }

    #[test]
    fn cells_are_all_combinations() {
        let options = of(&[
            "--sizes",
            "8,1KiB",
            "--types",
            "f32,i64",
            "--operand",
            "registered,slice",
            "--iterations",
            "5,6",
            "--warm-up",
            "3",
        ])
        .unwrap();
        let cells = options.cells(4).unwrap();
        assert_eq!(cells.len(), 8);
        assert_eq!((cells[1].bytes, cells[1].length, cells[1].warm_ups), (1024, Length::Iterations(6), 3));
        assert_eq!((cells[7].kind, cells[7].operand, cells[7].elements()), (Type::I64, Operand::Slice, 128));
        let check = of(&["--tuner-check"]).unwrap();
        let cells = check.cells(2).unwrap();
        assert_eq!((cells.len(), cells[0].bytes, cells[23].bytes), (24, 8, 64 << 20));
        assert_eq!((check.algorithms().len(), check.algorithms()[0]), (5, Algorithm::Auto));
    }

    #[test]
    fn simulated_hosts_have_the_ranks_in_order() {
        let options = of(&["--hosts", "2,1,2"]).unwrap();
        assert_eq!(options.local_ranks().unwrap(), [5]);
        let hosts: Vec<_> = (0..6).map(|rank| options.host(rank)).collect();
        assert_eq!(hosts, [Some(0), Some(0), Some(1), Some(2), Some(2), None]);
        assert_eq!(of(&["--ranks", "3"]).unwrap().host(0), None);
        assert_eq!(of(&["--hosts", "2,1", "--ranks", "3"]).unwrap().local_ranks().unwrap(), [3]);
        for (arguments, says) in [
            (&["--hosts", "2,2", "--ranks", "3"][..], "--hosts has 4 ranks; leave --ranks out"),
            (&["--hosts", "2,2", "--ranks", "4,8"], "--hosts has 4 ranks; leave --ranks out"),
            (&["--hosts", "64,1"], "65 ranks, and the command starts at most 64"),
        ] {
            let failure = of(arguments).unwrap().local_ranks().unwrap_err();
            assert!(failure.is_usage() && failure.to_string().contains(says), "{failure}");
        }
    }

    #[test]
    fn sums_of_the_content_are_exact() {
        for kind in Type::value_variants() {
            for ranks in [1, 2, 8] {
                for (reduction, factor) in [(Reduction::Sum, 1), (Reduction::Mean, ranks)] {
                    let most = (values(*kind, reduction, ranks) - 1) * (factor * ranks) as u64;
                    assert!(most <= kind.exact(), "{kind:?} {reduction:?} {ranks}");
                }
            }
        }
    }
}

#[cfg(test)]
mod choices_tests {
    use tonic_rdma_commands::parse_name;

    use super::*;

    fn names_are_those_of_json<T: ValueEnum + Copy + Serialize + std::fmt::Debug + PartialEq>() {
        for value in T::value_variants() {
            assert_eq!(parse_name::<T>("value", value.name()), Ok(*value));
            assert_eq!(serde_json::to_value(value).unwrap(), value.name());
        }
    }

    #[test]
    fn names_are_those_of_json_and_unknown_ones_are_refused_with_a_list() {
        names_are_those_of_json::<Algorithm>();
        names_are_those_of_json::<Type>();
        names_are_those_of_json::<Operand>();
        let error = parse_name::<Type>("type", "f23").unwrap_err().to_string();
        assert!(error.contains("\"f23\"") && error.contains("f32, f64, f16, bf16"), "{error}");
        // The library has the same algorithms under the same names.
        let fixed = Algorithm::value_variants().iter().filter_map(|algorithm| algorithm.fixed());
        assert!(fixed.eq(tonic_rdma_collective::Algorithm::ALL));
    }
}
