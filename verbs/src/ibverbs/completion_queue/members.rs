//! The queue pairs that complete on a completion queue, and the translation of the device's completions for them.

use std::sync::Arc;

use ibverbs_sys as sys;

use super::status;
use crate::ibverbs::device::Device;
use crate::ibverbs::posting::core::Core;
use crate::ibverbs::ticket::{RequestKind, Slot, Ticket};
use crate::sync::lock;
use crate::{CompletionOpcode, CompletionStatus, QueuePairNumber, VerbsError, WorkCompletion};

/// The queue pairs that complete here.
#[derive(Debug, Default)]
pub(super) struct Members {
    slots: Vec<Member>,
    free: Vec<u16>,
}

#[derive(Debug, Default)]
struct Member {
    generation: u16,
    /// The queue pair, and which of its queues complete here.
    core: Option<(Arc<Core>, Role)>,
    /// Whether the device has flushed the queue pair, and all flushed completions were polled or are in the queue.
    flushed: bool,
}

/// Which queues of a queue pair complete on a completion queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Role {
    pub(crate) sends: bool,
    pub(crate) receives: bool,
}

impl Members {
    /// Reserves a place for a queue pair.
    pub(super) fn enter(&mut self, core: &Arc<Core>, role: Role) -> Result<Slot, VerbsError> {
        let core = Some((Arc::clone(core), role));
        if let Some(index) = self.free.pop() {
            let member = &mut self.slots[usize::from(index)];
            member.generation = member.generation.wrapping_add(1) & Slot::GENERATIONS;
            member.core = core;
            member.flushed = false;
            return Ok(Slot { index, generation: member.generation });
        }
        let index = u16::try_from(self.slots.len()).map_err(|_| VerbsError::Limit {
            what: "queue pairs of one completion queue",
            asked: self.slots.len() as u64 + 1,
            limit: 1 << 16,
        })?;
        self.slots.push(Member { generation: 0, core, flushed: false });
        Ok(Slot { index, generation: 0 })
    }

    /// Takes a queue pair out, and drops its completions.
    pub(super) fn leave(&mut self, slot: Slot) {
        if let Some(member) = self.slots.get_mut(usize::from(slot.index))
            && member.generation == slot.generation
            && member.core.take().is_some()
        {
            self.free.push(slot.index);
        }
    }

    /// Translates a completion of the device to completions of the queue pair's user. Moves the queue pair to Error
    /// if the request failed.
    pub(super) fn translate(
        &self,
        device: &Device,
        completion: &sys::ibv_wc,
        mut report: impl FnMut(WorkCompletion),
    ) {
        let ticket = Ticket::from_bits(completion.wr_id());
        if ticket.kind == RequestKind::SharedReceive {
            if let Some(completed) = shared_receive(device, ticket, completion) {
                report(completed);
            }
            return;
        }
        let Some(member) = self.slots.get(usize::from(ticket.slot.index)) else { return };
        let member = member.core.as_ref().filter(|_| member.generation == ticket.slot.generation);
        let Some((core, _)) = member else { return };
        let queue = match ticket.kind {
            RequestKind::Hello => {
                match completion.error() {
                    None => core.hello_arrived(),
                    Some((status, vendor)) => core.fail(|| {
                        status::explain(core.flushes_here, status::translate(status), ticket.kind, vendor)
                    }),
                }
                return;
            }
            RequestKind::Receive => &core.receives,
            _ => &core.sends,
        };
        let status = match completion.error() {
            None => CompletionStatus::Success,
            Some((status, vendor_error)) => {
                let status = status::translate(status);
                core.fail(|| status::explain(core.flushes_here, status, ticket.kind, vendor_error));
                status
            }
        };
        // Only a successful completion states its kind.
        let with_immediate = status == CompletionStatus::Success
            && completion.opcode() == sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let completed = WorkCompletion {
            wr_id: 0,
            status,
            opcode: match ticket.kind {
                RequestKind::Send | RequestKind::Hello => CompletionOpcode::Send,
                RequestKind::Write => CompletionOpcode::Write,
                RequestKind::Read => CompletionOpcode::Read,
                RequestKind::Receive if with_immediate => CompletionOpcode::ReceiveWriteWithImmediate,
                RequestKind::Receive | RequestKind::SharedReceive => CompletionOpcode::Receive,
            },
            byte_len: match (status, ticket.kind) {
                (CompletionStatus::Success, RequestKind::Receive) => completion.len() as u64,
                _ => 0,
            },
            immediate: completion.imm_data().map(u32::from_be),
            queue_pair: QueuePairNumber(core.number),
        };
        let mut report = |position, completed: WorkCompletion| {
            if let Some(wr_id) = queue.complete(position) {
                report(WorkCompletion { wr_id, ..completed });
            }
        };
        match &core.order {
            Some(order) if ticket.kind != RequestKind::Receive => {
                lock(order).arrive(ticket.position, completed, report);
            }
            _ => report(ticket.position, completed),
        }
    }

    /// Notes which queue pairs the device has flushed. [`flush`](Self::flush) uses this after the queue was polled
    /// empty.
    pub(super) fn note_flushed(&mut self) {
        for member in &mut self.slots {
            member.flushed = member.core.as_ref().is_some_and(|(core, _)| core.is_flushed());
        }
    }

    /// Completes requests that the device no longer reports: because it was removed, or because it ignores requests
    /// that are posted in Error.
    pub(super) fn flush(&self, completions: &mut [WorkCompletion], all: bool) -> usize {
        let mut filled = 0;
        let members = self.slots.iter().filter(|member| all || member.flushed);
        for (core, role) in members.filter_map(|member| member.core.as_ref()) {
            let queues = [
                (role.sends, &core.sends, CompletionOpcode::Send),
                (role.receives, &core.receives, CompletionOpcode::Receive),
            ];
            for (_, queue, opcode) in queues.into_iter().filter(|(here, ..)| *here) {
                while let Some(place) = completions.get_mut(filled) {
                    let flushed = WorkCompletion {
                        status: CompletionStatus::WorkRequestFlushed,
                        opcode,
                        queue_pair: QueuePairNumber(core.number),
                        ..WorkCompletion::EMPTY
                    };
                    let order = core.order.as_ref().filter(|_| opcode == CompletionOpcode::Send);
                    let known = order.and_then(|order| lock(order).take_early(queue.oldest()));
                    let Some(wr_id) = queue.complete_oldest() else { break };
                    *place = WorkCompletion { wr_id, ..known.unwrap_or(flushed) };
                    filled += 1;
                }
            }
        }
        filled
    }
}

/// Returns the completion of a receive of a shared receive queue. The receive completes even if its queue pair is
/// gone, because its buffer belongs to its user again.
fn shared_receive(device: &Device, ticket: Ticket, completion: &sys::ibv_wc) -> Option<WorkCompletion> {
    let wr_id = lock(&device.shared_receives).complete(ticket)?;
    let (status, byte_len, opcode) = match completion.error() {
        None => (CompletionStatus::Success, completion.len() as u64, completion.opcode()),
        Some((status, vendor_error)) => {
            let status = status::translate(status);
            let iwarp = device.manager.is_some();
            if let Some(pair) = lock(&device.pairs).get(&completion.qp_num) {
                pair.fail(|| status::explain(iwarp, status, ticket.kind, vendor_error));
            }
            (status, 0, sys::ibv_wc_opcode::IBV_WC_RECV)
        }
    };
    Some(WorkCompletion {
        wr_id,
        status,
        opcode: match opcode {
            sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => CompletionOpcode::ReceiveWriteWithImmediate,
            _ => CompletionOpcode::Receive,
        },
        byte_len,
        immediate: completion.imm_data().map(u32::from_be),
        queue_pair: QueuePairNumber(device.number_for_user(completion.qp_num)),
    })
}
