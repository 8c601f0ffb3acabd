//! Control of the parts: the messages of a gRPC stream of orders and reports between the coordinator and each
//! part.
//!
//! The stream is also the sign of life. A part ends its job when the stream of the coordinator ends, and the
//! coordinator ends the run when the stream of a part ends.

pub(crate) mod proto;

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tonic_rdma_commands::{Context as _, Failure};
use tonic_rdma_graph::GraphError;
use tonic_rdma_graph::dataflow::{KernelError, Value as _};
use tonic_rdma_graph::explain::SenderReport;
use tonic_rdma_graph::onnx::{Model, ModelBuilder, ModelValue, SymbolicDim, Weights};
use tonic_rdma_graph::placement::{Buffers, MemoryUse, Placements};
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::transfer::TransferMode;
use xxhash_rust::xxh3::xxh3_64;

/// An order of the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// A chunk of the model's file, in the content.
    Model,
    /// The model is complete: load it, and listen for the other parts.
    Load(Job),
    /// Connect to the other parts, which listen at these addresses, in order.
    Connect { peers: Vec<String> },
    /// What this part checks against.
    Expect(Expected),
    /// Run micro-batches.
    Run(Trial),
    /// Report what is known of the tensors that this part sends.
    Describe,
}

/// What a part has to know before it can load the model and connect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) part: usize,
    pub(crate) parts: usize,
    /// The name of the model's file, for messages.
    pub(crate) model: String,
    pub(crate) symbols: Vec<String>,
    /// The length of the symbolic dimensions in each set of inputs.
    pub(crate) lengths: Vec<u64>,
    /// The number of sets of inputs.
    pub(crate) sets: u64,
    pub(crate) seed: u64,
    /// The part of each node.
    pub(crate) assignment: Vec<usize>,
    pub(crate) modes: Vec<TransferMode>,
    pub(crate) receive: ReceiveMode,
    /// The number of micro-batches that may be under way.
    pub(crate) window: usize,
    /// The most registered memory that a part reserves before the first step, in bytes.
    pub(crate) memory: Option<u64>,
    /// The number of threads that run nodes.
    pub(crate) threads: usize,
    /// The longest time to connect, and the longest time of a run without progress, in milliseconds.
    pub(crate) limit_ms: u64,
}

/// The digests of the unsplit run that concern a part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Expected {
    /// For each crossing tensor that the part receives: its number, and the digest for each set of inputs.
    pub(crate) crossings: Vec<(usize, Vec<u64>)>,
    /// The same for each result that the part computes, by the position of the result.
    pub(crate) results: Vec<(usize, Vec<u64>)>,
}

/// Some micro-batches in one mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) mode: TransferMode,
    /// The number of the first micro-batch of this trial. It is higher than those of all earlier trials, in
    /// any mode.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Whether no kernel runs, and the tensors of the last computed micro-batch cross again.
    pub(crate) replay: bool,
    /// Whether every tensor that arrives, and every result, is compared. Replays compare nothing.
    pub(crate) check: bool,
}

/// A report of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Report {
    /// The model is loaded, and the part listens for the other parts on this port.
    Loaded { port: u16 },
    /// The part is connected with all other parts. Before the first step it got this number of addresses of
    /// static slots from them.
    Connected { static_addresses: usize },
    /// The digests are there.
    Ready,
    /// A trial is done.
    Done(Done),
    /// A tensor is not what the unsplit model gives. The content has its bytes.
    Differs(Differs),
    /// What is known of the tensors that this part sends.
    Tensors(Described),
    /// The part can't go on.
    Failed { reason: String, usage: bool },
}

/// The result of a trial.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) nanos: u64,
    /// The number of tensors that were compared, and of those that differ.
    pub(crate) checked: u64,
    pub(crate) errors: u64,
}

/// A tensor that is not what the unsplit model gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Differs {
    pub(crate) what: Checked,
    pub(crate) mode: TransferMode,
    pub(crate) micro_batch: u64,
    /// The set of inputs.
    pub(crate) set: u64,
    /// The type and the shape of the tensor that arrived.
    pub(crate) spec: String,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Checked {
    /// A crossing tensor, by its number.
    Crossing(usize),
    /// A result of the model, by its position.
    Result(usize),
}

/// What a part knows of the tensors that it sends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Described {
    /// Memory and counters of each tensor in `rdma-zerocp`, or else in `rdma-in-place`. Empty without these
    /// modes.
    pub(crate) tensors: Vec<SenderReport>,
    pub(crate) modes: Vec<SentCounts>,
    pub(crate) memory: PartMemory,
}

/// The registered memory of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartMemory {
    /// The slots of all modes, to receive in.
    pub(crate) slots: MemoryUse,
    /// The memory to send from.
    pub(crate) sends: MemoryUse,
}

/// Returns the placement of crossing tensors within a limit for registered memory, if there is one. All
/// processes place them with the same numbers.
pub(crate) fn within(
    placements: Placements,
    memory: Option<u64>,
    window: usize,
    modes: &[TransferMode],
) -> Result<Placements, GraphError> {
    let fixed = modes.iter().filter(|mode| mode.has_static_slots()).count();
    let reads = modes.iter().filter(|mode| mode.uses_slots()).count() - fixed;
    let buffers = Buffers { window, modes: fixed, reads };
    memory.map_or(Ok(placements.clone()), |limit| placements.within(limit, buffers))
}

/// How a part sent and received its tensors in a mode, after the first micro-batch, in trials that compute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SentCounts {
    pub(crate) mode: TransferMode,
    pub(crate) sent: u64,
    /// Tensors that the sender copied.
    pub(crate) copied: u64,
    /// Tensors that the part received, and those of them that it copied after they had arrived.
    pub(crate) received: u64,
    pub(crate) received_copied: u64,
}

/// Reads the text of a message. `from` names the sender.
pub(crate) fn read<T: DeserializeOwned>(text: &str, from: &str) -> Result<T, Failure> {
    serde_json::from_str(text).map_err(|error| {
        let shown: String = text.chars().take(200).collect();
        Failure::run(format!(
            "{from} sent {shown:?}, which is no message of this version of the command: {error}"
        ))
    })
}

/// Makes the text of a message.
pub(crate) fn text(message: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(message).context("can't make JSON of a message")
}

/// Returns what loads a model. All processes load it with the same settings.
pub(crate) fn loader(symbols: &[String], seed: u64) -> Result<ModelBuilder, Failure> {
    let dims: Result<Vec<SymbolicDim>, GraphError> = symbols.iter().map(|symbol| symbol.parse()).collect();
    let dims = dims.map_err(|error| Failure::usage(format!("--symbol: {error}")))?;
    Ok(Model::builder().weights(Weights::Seeded(seed)).dims(dims))
}

/// Returns the lengths of the symbolic dimensions in a set of inputs. Each symbol begins at another position
/// of the list.
pub(crate) fn lengths(symbols: &[String], lengths: &[u64], set: u64) -> BTreeMap<String, u64> {
    let positions = symbols.iter().zip(set as usize..);
    positions
        .filter_map(|(symbol, position)| {
            Some((symbol.clone(), *lengths.get(position % lengths.len().max(1))?))
        })
        .collect()
}

/// Returns the bytes of a tensor, as they cross.
pub(crate) fn content(value: &ModelValue) -> Result<Bytes, KernelError> {
    Ok(value.share()?.serialize()?.1)
}

/// Returns the digest of a tensor: of its shape and its bytes.
pub(crate) fn digest(value: &ModelValue) -> Result<u64, KernelError> {
    // Tensors with the same bytes and other shapes differ.
    Ok(xxh3_64(&content(value)?).rotate_left(1) ^ xxh3_64(value.spec()?.to_string().as_bytes()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

    use super::*;

    #[test]
    fn messages_are_read_back() {
        let trial = Trial { mode: TransferMode::RdmaCp, first: 4, count: 2, replay: true, check: false };
        let expected = Expected { crossings: vec![(0, vec![u64::MAX, 1])], results: vec![] };
        for sent in [Order::Model, Order::Run(trial), Order::Expect(expected)] {
            assert_eq!(read::<Order>(&text(&sent).unwrap(), "a test").unwrap(), sent);
        }
        let failed = Report::Failed { reason: "two\nlines".to_owned(), usage: true };
        assert_eq!(read::<Report>(&text(&failed).unwrap(), "a test").unwrap(), failed);
        let error = read::<Report>("{}", "part 3").unwrap_err().to_string();
        assert!(error.contains("part 3") && error.contains("{}"), "{error}");
    }

    #[test]
    fn digests_tell_contents_and_shapes_apart() {
        let of = |dims: &[u64], last: u8| {
            let spec = TensorSpec::new(Dtype::U8, Shape::new(dims).unwrap()).unwrap();
            let mut fill = |bytes: &mut [u8]| {
                bytes.fill(0);
                bytes[5] = last;
                Ok(())
            };
            digest(&ModelValue::filled(&spec, &mut fill).unwrap()).unwrap()
        };
        assert_eq!(of(&[2, 3], 1), of(&[2, 3], 1));
        assert!(of(&[2, 3], 1) != of(&[2, 3], 2) && of(&[2, 3], 1) != of(&[3, 2], 1));
    }

    #[test]
    fn symbols_take_the_lengths_in_turn() {
        let symbols = ["a".to_owned(), "b".to_owned()];
        let found = |set| lengths(&symbols, &[5, 6, 7], set).into_values().collect::<Vec<_>>();
        assert_eq!([found(0), found(1), found(2), found(3)], [[5, 6], [6, 7], [7, 5], [5, 6]]);
    }
}
