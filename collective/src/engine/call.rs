//! A call of a collective operation, and its packed form, which every message carries.
//!
//! ```text
//!  bits 0..3     the operation
//!       3..7     the type of the elements
//!       7..12    the reduction, 0 for none, times 6, and the algorithm
//!      12..24    the root of a broadcast: that of any group, because Launch::MAX_SIZE is 2^12
//!      24..64    the number of elements, at most 2^40 - 1
//! ```
//!
//! Ranks whose packed calls differ have called different operations.

use std::fmt;

use tonic_rdma_tensor::Dtype;

use crate::group::Launch;
use crate::plan::{Algorithm, Collective};
use crate::reduce::Reduction;

/// A call: an operation and its arguments, without the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) dtype: Dtype,
    /// `None` for operations that do not reduce.
    pub(crate) reduction: Option<Reduction>,
    pub(crate) algorithm: Algorithm,
    /// The number of elements of the whole; see [`Arguments`](crate::plan::Arguments).
    pub(crate) elements: usize,
    /// The largest number of elements of one step.
    pub(crate) chunk: usize,
}

/// The operation of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Group(Collective),
    /// Elements from one rank to another. The sender calls `send`, and the receiver calls `recv`.
    Send {
        to: usize,
    },
    Receive {
        from: usize,
    },
}

const DTYPES: [Dtype; 12] = [
    Dtype::F16,
    Dtype::Bf16,
    Dtype::F32,
    Dtype::F64,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::U8,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
];
const KINDS: [&str; 6] = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "send"];
const MOST_ELEMENTS: u64 = (1 << 40) - 1;
const ROOTS: usize = 1 << 12;
const _: () = assert!(Launch::MAX_SIZE <= ROOTS && DTYPES.len() < 16);
/// Room for this many algorithms.
const ALGORITHMS: usize = 6;
const _: () = assert!(Algorithm::ALL.len() <= ALGORITHMS && (Reduction::Max as usize + 2) * ALGORITHMS <= 32);

impl Call {
    /// Returns the packed form.
    pub(crate) fn pack(&self) -> u64 {
        let (kind, root) = match self.kind {
            Kind::Group(Collective::AllReduce) => (0, 0),
            Kind::Group(Collective::ReduceScatter) => (1, 0),
            Kind::Group(Collective::AllGather) => (2, 0),
            Kind::Group(Collective::Broadcast { root }) => (3, root % ROOTS),
            Kind::Group(Collective::Barrier) => (4, 0),
            Kind::Send { .. } | Kind::Receive { .. } => (5, 0),
        };
        let dtype = DTYPES.iter().position(|dtype| *dtype == self.dtype).unwrap_or(15) as u64;
        // By the order of their declarations.
        let reduction = self.reduction.map_or(0, |reduction| 1 + reduction as usize);
        let reduction_and_algorithm = (reduction * ALGORITHMS + self.algorithm as usize) as u64;
        kind | dtype << 3
            | reduction_and_algorithm << 7
            | (root as u64) << 12
            | (self.elements as u64).min(MOST_ELEMENTS) << 24
    }
}

impl Call {
    /// Returns the span of a call of this rank, from its start to its end, for subscribers of `tracing`.
    pub(super) fn span(&self, ranks: usize) -> tracing::Span {
        let operation = || match self.kind {
            Kind::Receive { .. } => "receive",
            _ => KINDS[(self.pack() & 7) as usize],
        };
        let planned = || matches!(self.kind, Kind::Group(kind) if kind != Collective::Barrier);
        tracing::debug_span!(
            "collective",
            operation = operation(),
            algorithm = planned().then(|| tracing::field::display(self.algorithm)),
            ranks,
            bytes = self.elements * self.dtype.size().unwrap_or_default(),
            dtype = %self.dtype,
        )
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Packed(self.pack()), f)
    }
}

/// A packed call, which can be shown. It may come from a peer, so every value has a text.
pub(crate) struct Packed(pub(crate) u64);

impl fmt::Display for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = |from: u32, count: u32| (self.0 >> from & ((1 << count) - 1)) as usize;
        let kind = bits(0, 3);
        match KINDS.get(kind) {
            Some(name) => f.write_str(name)?,
            None => write!(f, "unknown operation {kind}")?,
        }
        if kind == 4 {
            return Ok(());
        }
        write!(f, " of {} elements", bits(24, 40))?;
        match DTYPES.get(bits(3, 4)) {
            Some(dtype) => write!(f, " of type {dtype}")?,
            None => write!(f, " of unknown type {}", bits(3, 4))?,
        }
        let (reduction, algorithm) = (bits(7, 5) / ALGORITHMS, bits(7, 5) % ALGORITHMS);
        if let Some(reduction) = reduction.checked_sub(1) {
            match Reduction::all().nth(reduction) {
                Some(reduction) => write!(f, " by {reduction}")?,
                None => write!(f, " by unknown reduction {reduction}")?,
            }
        }
        if kind == 3 {
            write!(f, " from rank {}", bits(12, 12))?;
        }
        if kind < 4 {
            match Algorithm::ALL.get(algorithm) {
                Some(algorithm) => write!(f, ", {algorithm}")?,
                None => write!(f, ", unknown algorithm {algorithm}")?,
            }
        }
        Ok(())
    }
}
