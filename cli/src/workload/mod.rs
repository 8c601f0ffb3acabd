//! The traffic of deep learning: the messages that a training job sends, as lengths.
//!
//! ```text
//!  Workload ─┬─ Size                           an operation is one message of one buffer
//!            ├─ Mix    uniform, random, skew:  an operation is one message of ten buffers
//!            ├─ Model  resnet50, vgg16, …:     an operation is one set, a message of one buffer for each variable
//!            └─ Blocks                         an operation is one set, a message for each of 4096 scattered blocks
//! ```
//!
//! This module owns the tables and their arithmetic. It does not make content and does not send messages.

mod models;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::payload::seeded::SplitMix64;
use tonic_rdma_commands::{Named as _, units};

pub(crate) use crate::workload::models::{Model, Variable};

/// Lengths of a message's buffers in bytes, in their order.
pub(crate) type Message = Vec<u64>;

/// A kind of traffic: payloads of one size, or a workload with a name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Workload {
    /// One payload of this many bytes.
    Size(u64),
    /// Messages of buffers of mixed lengths.
    Mix(Mix),
    /// Sets of variables: a worker's messages to its parameter servers after a mini-batch.
    Model(Model),
    /// Sets of the variables that one of several servers holds. It has no name on the command line.
    Shard(Shard),
    /// Sets of blocks of one length, anywhere in memory.
    Blocks,
}

/// The share of a model's variables that one of `servers` servers holds: they hold the variables in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shard {
    pub(crate) model: Model,
    pub(crate) server: usize,
    pub(crate) servers: usize,
}

impl Shard {
    /// Returns the bytes of each variable of the share.
    pub(crate) fn lengths(self) -> impl Iterator<Item = u64> {
        let variables = self.model.variables().into_iter().skip(self.server).step_by(self.servers.max(1));
        variables.map(|variable| variable.bytes())
    }
}

impl Workload {
    /// Returns all workloads with a name.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let mixes = Mix::value_variants().iter().copied().map(Self::Mix);
        mixes.chain(Model::value_variants().iter().copied().map(Self::Model)).chain([Self::Blocks])
    }

    /// Returns the name on the command line and in the JSON. A size has none.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::Size(_) => None,
            Self::Mix(mix) => Some(mix.name()),
            Self::Model(model) | Self::Shard(Shard { model, .. }) => Some(model.name()),
            Self::Blocks => Some("blocks"),
        }
    }

    /// Returns the workload called `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::all().find(|workload| workload.name() == Some(name))
    }

    /// Returns the operations of one cycle, which repeats. Each operation is a list of messages.
    pub(crate) fn operations(self) -> Vec<Vec<Message>> {
        match self {
            Self::Size(bytes) => vec![vec![vec![bytes]]],
            Self::Mix(mix) => mix.messages().into_iter().map(|message| vec![message]).collect(),
            Self::Model(model) => {
                vec![model.variables().iter().map(|variable| vec![variable.bytes()]).collect()]
            }
            Self::Shard(shard) => vec![shard.lengths().map(|bytes| vec![bytes]).collect()],
            Self::Blocks => vec![blocks()],
        }
    }

    /// Returns the bytes of an operation: the average over a cycle, rounded.
    pub(crate) fn bytes(self) -> u64 {
        let operations = self.operations();
        let bytes: u64 = operations.iter().flatten().flatten().sum();
        let count = operations.len().max(1) as u64;
        (bytes + count / 2) / count
    }

    /// Returns the number of messages of the operation that has most.
    pub(crate) fn most_messages(self) -> u64 {
        self.operations().iter().map(|messages| messages.len() as u64).max().unwrap_or(0)
    }

    /// Returns the bytes of the largest message.
    pub(crate) fn largest_message(self) -> u64 {
        self.operations().iter().flatten().map(|message| message.iter().sum()).max().unwrap_or(0)
    }

    /// Returns the bytes of the largest operation.
    pub(crate) fn largest_operation(self) -> u64 {
        self.operations().iter().map(|operation| operation.iter().flatten().sum()).max().unwrap_or(0)
    }

    /// Returns whether an operation is a set of many messages.
    pub(crate) const fn is_set(self) -> bool {
        matches!(self, Self::Model(_) | Self::Shard(_) | Self::Blocks)
    }

    /// Describes an operation, for people.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::Size(_) => format!("{self}: a message of one buffer"),
            Self::Mix(mix) => format!("{self}: {}", mix.describe()),
            Self::Model(model) | Self::Shard(Shard { model, .. }) => {
                format!("{self}: a set of {} variables, a message each", model.variables().len())
            }
            Self::Blocks => format!("{self}: a set of {BLOCKS} blocks, a message each, scattered in memory"),
        }
    }
}

/// How long the payloads of an operation are (figure 7 of Xue et al. is the curve of the variables of six models).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PayloadSizes {
    name: &'static str,
    /// Each length in bytes, ascending, and the number of messages of a cycle that have it.
    sizes: Vec<(u64, u64)>,
}

impl PayloadSizes {
    /// Returns the sizes of each of `workloads` that has a name, once.
    pub(crate) fn of_each(workloads: impl IntoIterator<Item = Workload>) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for workload in workloads {
            let Some(name) = workload.name() else { continue };
            if all.iter().all(|other| other.name != name) {
                let mut sizes = BTreeMap::new();
                for message in workload.operations().iter().flatten() {
                    *sizes.entry(message.iter().sum()).or_insert(0) += 1;
                }
                all.push(Self { name, sizes: sizes.into_iter().collect() });
            }
        }
        all
    }

    /// Draws the share of the messages, and that of their bytes, in messages of at least 64 bytes, 256 bytes and so
    /// on, for people.
    pub(crate) fn curve(&self) -> String {
        let above = |least: u64, weight: Weight| -> f64 {
            self.sizes.iter().filter(|(bytes, _)| *bytes >= least).map(weight).sum::<u64>() as f64
        };
        let (messages, bytes): (Weight, Weight) = (|(_, count)| *count, |(bytes, count)| bytes * count);
        let curve = |weight: Weight| -> String {
            let height = |least| (above(least, weight) / above(0, weight) * 8.0).ceil() as usize;
            FROM.iter().map(|least| BARS[height(*least).min(8)]).collect()
        };
        let percent = |least: u64| above(least, messages) / above(0, messages) * 100.0;
        format!(
            "{}: {} of the messages and {} of the bytes in messages from {} to {} on, by factors of 4; {:.0} % of the messages from \
             1 KiB on, {:.0} % from 1 MiB on",
            self.name,
            curve(messages),
            curve(bytes),
            units::size(FROM[0]),
            units::size(FROM[FROM.len() - 1]),
            percent(1 << 10),
            percent(1 << 20)
        )
    }
}

/// What a length and its number of messages count for.
type Weight = fn(&(u64, u64)) -> u64;

/// The least sizes of the curve, and heights in eighths.
const FROM: [u64; 12] = {
    let mut from = [64; 12];
    let mut index = 1;
    while index < from.len() {
        from[index] = from[index - 1] * 4;
        index += 1;
    }
    from
};
const BARS: [char; 9] = ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

impl fmt::Display for Workload {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.name()) {
            (Self::Size(bytes), _) => formatter.pad(&units::size(*bytes)),
            (_, name) => formatter.pad(name.unwrap_or_default()),
        }
    }
}

/// Number of blocks of an operation, and length of each in bytes.
pub(crate) const BLOCKS: usize = 4096;
const BLOCK: u64 = 16 << 10;

/// Number of slots for blocks, each as long as a block: two for each block, so that half of them stay empty.
pub(crate) const SLOTS: usize = 2 * BLOCKS;

/// Returns the only operation: a message for each block.
fn blocks() -> Vec<Message> {
    vec![vec![BLOCK]; BLOCKS]
}

/// Returns the slot of each block of an operation, as an offset in memory of [`SLOTS`] blocks. `seed`
/// determines the slots, which are distinct and in no order.
pub(crate) fn scattered(seed: u64) -> Vec<u64> {
    let mut slots: Vec<u64> = (0..SLOTS as u64).collect();
    let mut draws = SplitMix64::new(seed);
    for index in 0..BLOCKS {
        slots.swap(index, index + draws.choice(SLOTS - index));
    }
    slots.truncate(BLOCKS);
    slots.into_iter().map(|slot| slot * BLOCK).collect()
}

/// Number of buffers of a message.
pub(crate) const BUFFERS: usize = 10;

/// Lengths of a small, a medium and a large buffer, in bytes.
const SMALL: u64 = 10;
const MEDIUM: u64 = 10 << 10;
const LARGE: u64 = 1 << 20;

/// Number of messages of `random` before the first repeats.
const RANDOM_CYCLE: usize = 64;
const RANDOM_SEED: u64 = 10;

/// The lengths of a message's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Mix {
    /// Small, medium and large alternate: shares as equal as ten buffers allow.
    Uniform,
    /// Each length is drawn with the same probability, so messages differ. The sequence is equal in every
    /// run.
    Random,
    /// Six large, three medium, one small.
    Skew,
}

impl Mix {
    /// Describes a message, for people.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Uniform => "a message of 10 buffers, 10 B, 10 KiB and 1 MiB in turn",
            Self::Random => "a message of 10 buffers, each 10 B, 10 KiB or 1 MiB by seeded draw",
            Self::Skew => "a message of 10 buffers, 6 of 1 MiB, 3 of 10 KiB, 1 of 10 B",
        }
    }

    /// Returns the messages of one cycle.
    pub(crate) fn messages(self) -> Vec<Message> {
        match self {
            Self::Uniform => vec![[SMALL, MEDIUM, LARGE].into_iter().cycle().take(BUFFERS).collect()],
            Self::Random => {
                let mut draws = SplitMix64::new(RANDOM_SEED);
                let mut buffer = || [SMALL, MEDIUM, LARGE][draws.choice(3)];
                (0..RANDOM_CYCLE).map(|_| (0..BUFFERS).map(|_| buffer()).collect()).collect()
            }
            // Short buffers stand between long ones.
            Self::Skew => {
                let (s, m, l) = (SMALL, MEDIUM, LARGE);
                vec![vec![l, m, l, l, m, l, l, m, l, s]]
            }
        }
    }
}

/// The largest batch that takes no longer than one sample in models whose time grows.
const ONE_SAMPLE_UP_TO: u32 = 32;

impl Model {
    /// Returns the computing time of a mini-batch of `batch` samples, or `None` for a model that the table
    /// does not have.
    pub(crate) fn compute_time(self, batch: u32) -> Option<Duration> {
        let sample = self.sample_time()?;
        Some(match self {
            Self::InceptionV3 | Self::Lstm | Self::Gru if batch > ONE_SAMPLE_UP_TO => {
                sample * batch / ONE_SAMPLE_UP_TO
            }
            _ => sample,
        })
    }

    /// Returns the computing time of one sample in table 2.
    const fn sample_time(self) -> Option<Duration> {
        let micros = match self {
            Self::Alexnet => 7_610,
            Self::InceptionV3 => 68_320,
            Self::Vgg16 => 30_920,
            Self::Lstm => 33_330,
            Self::Gru => 30_440,
            Self::Fcn5 => 4_880,
            Self::Resnet50 => return None,
        };
        Some(Duration::from_micros(micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_read_back() {
        for workload in Workload::all() {
            assert_eq!(workload.name().and_then(Workload::from_name), Some(workload));
        }
        assert_eq!(Workload::from_name("resnet"), None);
    }

    #[test]
    fn every_operation_has_messages_and_every_message_bytes() {
        for workload in Workload::all() {
            let operations = workload.operations();
            assert!(!operations.is_empty());
            for message in operations.iter().flatten() {
                assert!(!message.is_empty() && message.iter().all(|bytes| *bytes > 0), "{workload}");
            }
            assert!(operations.iter().all(|messages| !messages.is_empty()));
            assert!(workload.largest_message() <= workload.largest_operation());
            assert!(workload.largest_message() < 2047 << 20, "{workload} would not fit a message");
            assert!(workload.bytes() <= workload.largest_operation());
        }
    }

    #[test]
    fn an_operation_has_one_message_for_a_mix_for_each_variable_or_for_each_block() {
        for mix in Mix::value_variants().iter().copied() {
            assert!(Workload::Mix(mix).operations().iter().all(|messages| messages.len() == 1));
        }
        for model in Model::value_variants().iter().copied() {
            let operations = Workload::Model(model).operations();
            assert_eq!(operations.len(), 1);
            assert_eq!(operations[0].len(), model.variables().len());
            assert!(operations[0].iter().all(|message| message.len() == 1));
        }
        let blocks = Workload::Blocks.operations();
        assert_eq!((blocks.len(), Workload::Blocks.most_messages()), (1, 4096));
        assert!(blocks[0].iter().all(|message| message == &[16 << 10]));
        assert!(Workload::Blocks.is_set() && !Workload::Mix(Mix::Skew).is_set());
    }
}

#[cfg(test)]
mod sizes_tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_messages_and_their_curve_falls() {
        let workloads = [Workload::Model(Model::Gru), Workload::Size(64), Workload::Model(Model::Gru)];
        let [gru] = &PayloadSizes::of_each(workloads)[..] else { unreachable!("one has a name") };
        // Biases of the output and of three gates; the output's matrix, and two matrices for each gate.
        assert_eq!(gru.sizes, [(4000, 1), (4096, 3), (4_096_000, 1), (4 << 20, 6)]);
        let text = gru.curve();
        assert!(
            text.starts_with("gru: ████▆▆▆▆▅··· of the messages and ████████▇··· of the bytes"),
            "{text}"
        );
        assert!(text.contains("from 64 B to 256 MiB on") && text.contains("64 % from 1 MiB"), "{text}");
        let blocks = &PayloadSizes::of_each([Workload::Blocks])[0];
        assert_eq!(blocks.sizes, [(16 << 10, 4096)]);
    }
}

#[cfg(test)]
mod blocks_tests {
    use super::*;

    #[test]
    fn places_are_within_the_room_distinct_and_in_no_order() {
        let offsets = scattered(1);
        assert_eq!(offsets, scattered(1));
        assert_ne!(offsets, scattered(2));
        assert!(offsets.iter().all(|offset| offset % BLOCK == 0 && offset + BLOCK <= SLOTS as u64 * BLOCK));
        let neighbours = offsets.windows(2).filter(|pair| pair[1] == pair[0] + BLOCK).count();
        assert!(neighbours < BLOCKS / 100, "{neighbours}");
        let mut sorted = offsets;
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), BLOCKS);
    }
}

#[cfg(test)]
mod mixes_tests {
    use super::*;

    fn shares(message: &Message) -> [usize; 3] {
        [SMALL, MEDIUM, LARGE].map(|length| message.iter().filter(|bytes| **bytes == length).count())
    }

    #[test]
    fn mixes_have_their_documented_shares() {
        assert_eq!(Mix::Uniform.messages().iter().map(shares).collect::<Vec<_>>(), [[4, 3, 3]]);
        assert_eq!(Mix::Skew.messages().iter().map(shares).collect::<Vec<_>>(), [[1, 3, 6]]);
        assert_eq!(Mix::Uniform.messages()[0].iter().sum::<u64>(), 3_176_488);
    }

    #[test]
    fn random_messages_differ_and_are_the_same_in_every_run() {
        let messages = Mix::Random.messages();
        assert_eq!(messages, Mix::Random.messages());
        assert_eq!(messages.len(), RANDOM_CYCLE);
        assert!(messages.iter().all(|message| shares(message).iter().sum::<usize>() == BUFFERS));
        let mut distinct = messages.clone();
        distinct.sort();
        distinct.dedup();
        assert!(distinct.len() > RANDOM_CYCLE * 9 / 10, "{} distinct", distinct.len());
        let total =
            messages.iter().map(shares).fold([0; 3], |sum, shares| [0, 1, 2].map(|i| sum[i] + shares[i]));
        assert!(total.iter().all(|count| (180..250).contains(count)), "{total:?} of 640");
    }
}

#[cfg(test)]
mod compute_times_tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn the_time_is_that_of_one_sample_up_to_a_batch_of_32() {
        for model in Model::value_variants().iter().copied() {
            let one = model.compute_time(1);
            assert_eq!(one.is_none(), model == Model::Resnet50, "{model:?}");
            for batch in [2, 8, 32] {
                assert_eq!(model.compute_time(batch), one, "{model:?}");
            }
        }
        assert_eq!(Model::Lstm.compute_time(1), Some(Duration::from_micros(33_330)));
    }

    #[test]
    fn above_32_only_three_models_take_longer() {
        for (model, times) in [
            (Model::Alexnet, 1),
            (Model::Vgg16, 1),
            (Model::Fcn5, 1),
            (Model::InceptionV3, 2),
            (Model::Lstm, 2),
            (Model::Gru, 2),
        ] {
            let one = model.compute_time(1);
            assert_eq!(model.compute_time(64), one.map(|one| one * times), "{model:?}");
        }
        assert_eq!(Model::Gru.compute_time(48), Some(Duration::from_micros(45_660)));
    }
}
