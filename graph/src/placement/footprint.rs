//! How much registered memory a part reserves before the first step (§3.4), and which tensors become dynamic
//! where that would be too much.

use serde::{Deserialize, Serialize};

use crate::dataflow::Outlet;
use crate::error::GraphError;
use crate::placement::{Crossing, Part, Placement, Placements};
use tonic_rdma::memory::Pool;
use tonic_rdma_tensor::TensorSpec;
use tonic_rdma_tensor::unstable::slot_bytes;

/// How many buffers a crossing tensor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// The number of steps in flight. A slot has a buffer for each, and so has a tensor at its sender.
    pub window: usize,
    /// The number of modes with static slots. Each of them has slots of its own.
    pub modes: usize,
    /// The number of modes in which the receiver reads all tensors, so that all slots are small.
    pub reads: usize,
}

/// The registered memory that a part reserves before the first step, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// The slots of the tensors that arrive.
    pub slots: u64,
    /// The tensors of known shape that leave, one for each step in flight.
    pub sends: u64,
}

/// Registered memory that was reserved before the first step, and what was used of it, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// What was reserved.
    pub preallocated: u64,
    /// What was used of that at least once.
    pub used: u64,
    /// What was registered beside it later, such as for tensors of unknown shape.
    pub beyond: u64,
    /// Allocations that should have been in registered memory, and found none.
    pub refused: u64,
}

impl Footprint {
    /// Returns all bytes.
    pub fn total(&self) -> u64 {
        self.slots.saturating_add(self.sends)
    }
}

impl Crossing {
    /// Returns the type and the shape if both are known before the first step, however the tensor is placed.
    pub fn spec(&self) -> Option<TensorSpec> {
        match &self.placement {
            Placement::Static(spec) => Some(*spec),
            Placement::Dynamic { fact, .. } => fact.spec().filter(|spec| spec.bytes().is_some()),
        }
    }

    /// Returns the bytes of the slot of this crossing tensor, in a mode with static slots or without.
    fn slot(&self, window: usize, has_static_slots: bool) -> u64 {
        let spec = match &self.placement {
            Placement::Static(spec) if has_static_slots => Some(spec),
            _ => None,
        };
        slot_bytes(spec, u32::try_from(window).unwrap_or(u32::MAX)).unwrap_or(u64::MAX)
    }
}

impl Placements {
    /// Returns the registered memory that a part reserves before the first step. Tensors of unknown shape
    /// have a small slot, and their sender registers memory for them from the second step on, as they need
    /// it.
    ///
    /// ```
    /// use tonic_rdma_graph::placement::{Buffers, Part, Partition, Placements};
    ///
    /// # use tonic_rdma_graph::dataflow::{Fact, Node, NodeId, Outlet, Role, Topology};
    /// # use tonic_rdma_tensor::Dtype;
    /// # let mut graph = Topology::new();
    /// # for name in ["input", "conv", "relu", "head"] {
    /// #     let inputs = graph.len().checked_sub(1).map(|node| Outlet { node: NodeId(node), output: 0 });
    /// #     graph.add(Node {
    /// #         name: name.to_owned(),
    /// #         kind: "Example".to_owned(),
    /// #         role: if inputs.is_none() { Role::Input } else { Role::Compute },
    /// #         inputs: inputs.into_iter().collect(),
    /// #         outputs: vec![Fact::known(Dtype::F32, &[1000])],
    /// #         work: 100,
    /// #         stays: false,
    /// #     })?;
    /// # }
    /// // input ─▶ conv ─▶ relu ─▶ head, each of 4000 bytes
    /// let placements = Placements::new(&graph, &Partition::at_cuts(&graph, &["relu"])?)?;
    /// let buffers = Buffers { window: 2, modes: 2, reads: 0 };
    /// let footprints = [0, 1].map(|part| placements.footprint(Part(part), buffers));
    /// assert_eq!((footprints[0].slots, footprints[0].sends), (0, 8192));
    /// assert_eq!((footprints[1].slots, footprints[1].sends), (2 * 8064, 0));
    /// // With less memory for slots, the tensor is read by the receiver. To be sent, it needs as much.
    /// let placements = placements.within(8192, buffers)?;
    /// assert!(!placements.crossings()[0].placement.is_static());
    /// let placements = placements.within(8000, buffers);
    /// assert_eq!(placements.unwrap_err().reason(), "memory: 8000 bytes are too little, 8192 are the least: part 0 sends from 8192");
    /// # Ok::<(), tonic_rdma_graph::GraphError>(())
    /// ```
    pub fn footprint(&self, part: Part, buffers: Buffers) -> Footprint {
        let slots = |is_static, modes: usize| {
            let lengths = self.slot_lengths(part, buffers.window, is_static);
            lengths.fold(0, u64::saturating_add).saturating_mul(modes as u64)
        };
        let slots = slots(true, buffers.modes).saturating_add(slots(false, buffers.reads));
        let sends = self.send_lengths(part).map(Pool::preallocated_bytes).fold(0, u64::saturating_add);
        Footprint { slots, sends: sends.saturating_mul(buffers.window as u64) }
    }

    /// Returns the bytes of the slots of a part, in one mode with static slots or without.
    pub(crate) fn slot_lengths(
        &self,
        part: Part,
        window: usize,
        has_static_slots: bool,
    ) -> impl Iterator<Item = u64> {
        self.arriving(part).map(move |crossing| crossing.slot(window, has_static_slots))
    }

    /// Returns the lengths of the tensors of known shape that a part sends in a step. A tensor that crosses to
    /// several parts is there once.
    pub(crate) fn send_lengths(&self, part: Part) -> impl Iterator<Item = usize> {
        let mut last: Option<Outlet> = None;
        // Crossing tensors of one outlet follow one another.
        let once = self.leaving(part).filter(move |it| last.replace(it.outlet) != Some(it.outlet));
        let lengths = once.filter_map(|crossing| usize::try_from(crossing.spec()?.bytes()?).ok());
        lengths.filter(|length| *length > 0)
    }

    /// Makes tensors of known shape dynamic until no part reserves more than `limit` bytes before the first
    /// step. A static tensor costs memory, and a dynamic one a round trip in each step, whatever its size: so
    /// as few as possible become dynamic, the largest first. [`footprint`](Self::footprint) has an example.
    ///
    /// # Errors
    /// Even with dynamic tensors alone, a part reserves more. The error names the least limit that works.
    pub fn within(mut self, limit: u64, buffers: Buffers) -> Result<Self, GraphError> {
        let saves = |crossing: &Crossing| {
            let [fixed, free] = [true, false].map(|is_static| crossing.slot(buffers.window, is_static));
            fixed.saturating_sub(free).saturating_mul(buffers.modes as u64)
        };
        let mut least: Option<(u64, String)> = None;
        for part in (0..self.partition.count()).map(Part) {
            let Footprint { slots, sends } = self.footprint(part, buffers);
            let mut savings: Vec<(u64, usize)> = self
                .arriving(part)
                .map(|crossing| (saves(crossing), crossing.id.0))
                .filter(|(bytes, _)| *bytes > 0)
                .collect();
            savings.sort_unstable();
            let total = slots.saturating_add(sends);
            let saved = savings.iter().map(|(bytes, _)| *bytes).fold(0, u64::saturating_add);
            let needs = total.saturating_sub(saved);
            if needs > limit && least.as_ref().is_none_or(|(least, _)| needs > *least) {
                let slots = needs.saturating_sub(sends);
                let of = [(sends, "sends from"), (slots, "needs for the slots of dynamic tensors")];
                let of = of.iter().filter(|(bytes, _)| *bytes > 0);
                let of: Vec<String> = of.map(|(bytes, what)| format!("{what} {bytes}")).collect();
                least = Some((needs, format!("part {part} {}", of.join(", and "))));
            }
            let mut excess = total.saturating_sub(limit);
            while excess > 0 && !savings.is_empty() {
                // The smallest that is enough alone, or else the largest.
                let enough = savings.partition_point(|(bytes, _)| *bytes < excess);
                let (bytes, crossing) = savings.remove(enough.min(savings.len() - 1));
                excess = excess.saturating_sub(bytes);
                self.crossings[crossing].make_dynamic(part, bytes, total, limit);
            }
        }
        match least {
            None => Ok(self),
            Some((least, why)) => {
                let reason = format!("{limit} bytes are too little, {least} are the least: {why}");
                Err(GraphError::of_setting("memory", reason))
            }
        }
    }
}

impl Crossing {
    fn make_dynamic(&mut self, part: Part, saved: u64, total: u64, limit: u64) {
        let Placement::Static(spec) = &self.placement else { return };
        let fact = crate::dataflow::Fact::known(spec.dtype(), spec.shape().dims());
        let why = format!(
            "all dimensions are known, but part {part} would reserve {total} bytes of at most {limit}; without static slots this tensor \
             saves {saved} bytes, and costs a round trip in each step"
        );
        self.placement = Placement::Dynamic { fact, why };
    }
}
