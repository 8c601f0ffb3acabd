//! Programs: plans whose elements have addresses in the memory of an operation.
//!
//! Four memories belong to an operation:
//! ```text
//!   Input     the caller's elements, only read; none for an operation in place
//!   Out       the caller's memory for the result
//!   Staging   registered memory of the engine, because peers can read neither from a slice nor outside a window
//!   Scratch   registered memory for what the plan calls scratch
//! ```
//! Plans are those of an operation in place ([`Arguments`](crate::plan::Arguments)). The compiler follows
//! each element through the plan: it knows in which memories an element is valid, and chooses where a step
//! writes:
//!
//! - A message that peers read lies in registered memory. A part that does not is copied to Staging before
//!   its first send. Such copies are steps of their own, so that no other send of the same elements comes
//!   before the copy.
//! - A step writes to Staging if Out is no registered memory and a later step sends the elements by
//!   reference. The last write of an element also copies it to Out, while it is in the cache.
//! - All other steps write to Out.

use std::ops::Range;

use crate::plan::{Action, Area, Plan, Span, writes};

/// Which of the memories of an operation is meant, in the order of `MemoryRefs`. No step writes to `Input`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryRole {
    Input,
    Out,
    Staging,
    Scratch,
}

/// An address in one of the memories, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) role: MemoryRole,
    pub(super) at: usize,
}

/// Bytes that move from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) from: Address,
    pub(super) to: Address,
    pub(super) length: usize,
}

/// A part of a message, or of a local step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The offset of the part in the message, in bytes.
    pub(super) offset: usize,
    pub(super) length: usize,
    pub(super) into: Address,
    /// The elements to reduce with.
    pub(super) reduce: Option<Address>,
    /// The elements that a local step takes in place of received ones.
    pub(super) with: Option<Address>,
}

#[derive(Debug)]
pub(super) enum Work {
    Send {
        to: usize,
        from: Address,
        length: usize,
        inline: bool,
    },
    Receive {
        from: usize,
        length: usize,
        parts: Vec<Part>,
        outs: Vec<Copy>,
    },
    /// Without parts, this copies elements that a send needs in Staging.
    Local {
        parts: Vec<Part>,
        outs: Vec<Copy>,
    },
    /// Finishes the elements at their ranges. Copies come first.
    Finish {
        copies: Vec<Copy>,
        ranges: Vec<(Address, usize)>,
        outs: Vec<Copy>,
    },
}

impl Work {
    pub(super) fn is_local(&self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Receive { .. })
    }
}

/// The steps between this rank and one other, in order.
#[derive(Debug)]
pub(super) struct PeerSteps {
    pub(super) rank: usize,
    pub(super) sends: Vec<u32>,
    pub(super) receives: Vec<u32>,
}

/// A compiled plan.
#[derive(Debug)]
pub(crate) struct Program {
    pub(super) steps: Vec<Work>,
    /// How many steps each step waits for.
    pub(super) waits: Vec<u32>,
    /// The steps that wait for each step.
    pub(super) then: Vec<Vec<u32>>,
    pub(super) peers: Vec<PeerSteps>,
    /// Copies after the last step: elements that no step has written to Out.
    pub(super) outs: Vec<Copy>,
    /// The bytes of Staging and Scratch.
    pub(super) staging: usize,
    pub(super) scratch: usize,
    /// The bytes that a run of the program copies. Reductions are not copies.
    pub(super) copied: usize,
}

/// The memory of an operation, as far as a program depends on it. Ranges are in elements of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MemoryShape {
    /// Bytes of an element.
    pub(super) size: usize,
    pub(super) elements: usize,
    /// The elements that Input has; `None` in place.
    pub(super) input: Option<Range<usize>>,
    pub(super) out: Range<usize>,
    /// The elements that the result consists of.
    pub(super) result: Range<usize>,
    /// Whether peers can read from Input and Out.
    pub(super) registered: bool,
    /// The largest length of an inline message, in bytes.
    pub(super) inline: usize,
}

/// Compiles `plan` for memory of this shape.
pub(super) fn compile(plan: &Plan, shape: &MemoryShape) -> Program {
    let mut compiler = Compiler::new(plan, shape);
    let count = plan.steps.len();
    let mut steps = Vec::with_capacity(count);
    for index in 0..count {
        compiler.index = index;
        steps.push(compiler.step());
    }
    let outs = compiler.outs(&(0..shape.elements));
    let mut then = vec![Vec::new(); count + compiler.stagings.len()];
    let mut waits = vec![0; count + compiler.stagings.len()];
    for (index, step) in plan.steps.iter().enumerate() {
        let staging = compiler.stagings.iter().position(|staging| staging.step == index);
        for &before in &step.after {
            let list: &mut Vec<u32> = &mut then[before as usize];
            list.push(index as u32);
            waits[index] += 1;
            if let Some(staging) = staging {
                list.push((count + staging) as u32);
                waits[count + staging] += 1;
            }
        }
    }
    for (index, staging) in compiler.after_staging {
        then[count + staging].push(index as u32);
        waits[index] += 1;
    }
    let copies = compiler.stagings.into_iter().map(|staging| staging.copies);
    steps.extend(copies.map(|outs| Work::Local { parts: Vec::new(), outs }));
    Program {
        peers: peers(plan),
        outs,
        staging: if compiler.stages { shape.elements * shape.size } else { 0 },
        scratch: plan.scratch * shape.size,
        copied: compiler.copied,
        steps,
        waits,
        then,
    }
}

fn peers(plan: &Plan) -> Vec<PeerSteps> {
    let mut peers: Vec<PeerSteps> = Vec::new();
    for (index, step) in plan.steps.iter().enumerate() {
        let (rank, sends) = match step.action {
            Action::Send { to, .. } => (to, true),
            Action::Receive { from, .. } => (from, false),
            Action::Local { .. } | Action::Finish { .. } => continue,
        };
        let at = match peers.iter().position(|peer| peer.rank == rank) {
            Some(at) => at,
            None => {
                peers.push(PeerSteps { rank, sends: Vec::new(), receives: Vec::new() });
                peers.len() - 1
            }
        };
        if sends {
            peers[at].sends.push(index as u32);
        } else {
            peers[at].receives.push(index as u32);
        }
    }
    peers
}

struct Compiler<'a> {
    plan: &'a Plan,
    shape: &'a MemoryShape,
    roles: RoleMap,
    index: usize,
    stages: bool,
    copied: usize,
    stagings: Vec<Staged>,
    /// Steps, and the copies to Staging that come before them.
    after_staging: Vec<(usize, usize)>,
}

/// Copies to Staging for a send.
struct Staged {
    step: usize,
    range: Range<usize>,
    copies: Vec<Copy>,
}

impl<'a> Compiler<'a> {
    fn new(plan: &'a Plan, shape: &'a MemoryShape) -> Self {
        let mut roles = RoleMap::new(shape.elements);
        match &shape.input {
            Some(input) => roles.change(input, |_| INPUT),
            None => roles.change(&shape.out, |_| OUT),
        }
        Self {
            plan,
            shape,
            roles,
            index: 0,
            stages: false,
            copied: 0,
            stagings: Vec::new(),
            after_staging: Vec::new(),
        }
    }

    fn step(&mut self) -> Work {
        match &self.plan.steps[self.index].action {
            Action::Send { to, from } => self.send(*to, from),
            Action::Receive { from, into, reduce } => {
                let (parts, outs) = self.write(into, reduce.as_ref(), None);
                Work::Receive { from: *from, length: into.range.len() * self.shape.size, parts, outs }
            }
            Action::Local { with, into, reduce } => {
                let (parts, outs) = self.write(into, Some(reduce), Some(with));
                Work::Local { parts, outs }
            }
            Action::Finish { span } => self.finish(span),
        }
    }

    fn send(&mut self, to: usize, span: &Span) -> Work {
        let length = span.range.len() * self.shape.size;
        let inline = length <= self.shape.inline;
        let mut copies = Vec::new();
        let from = if span.area == Area::Scratch {
            self.scratch(span.range.start)
        } else if span.range.is_empty() {
            Address { role: MemoryRole::Out, at: 0 }
        } else {
            let usable = if inline || self.shape.registered { !0 } else { STAGING };
            let common = self.roles.common(&span.range) & usable;
            if common == 0 {
                for (part, roles) in self.roles.parts(&span.range) {
                    if roles & STAGING == 0 {
                        copies.push(self.copy(&part, roles, STAGING));
                    }
                }
                self.roles.change(&span.range, |roles| roles | STAGING);
                let range = span.range.clone();
                self.stagings.push(Staged { step: self.index, range, copies });
                self.address(span.range.start, STAGING)
            } else {
                self.address(span.range.start, common)
            }
        };
        if from.role == MemoryRole::Staging {
            self.comes_after_staging(&span.range);
        }
        Work::Send { to, from, length, inline }
    }

    /// Notes that this step reads elements of Staging, so that it waits for the copies of earlier sends.
    fn comes_after_staging(&mut self, range: &Range<usize>) {
        for (at, staging) in self.stagings.iter().enumerate() {
            let entry = (self.index, at);
            if !intersection(&staging.range, range).is_empty() && !self.after_staging.contains(&entry) {
                self.after_staging.push(entry);
            }
        }
    }

    /// Returns the parts of a step that writes `into`, and the copies to Out after it.
    fn write(&mut self, into: &Span, reduce: Option<&Span>, with: Option<&Span>) -> (Vec<Part>, Vec<Copy>) {
        let count = into.range.len();
        let sources = [reduce, with].map(|span| span.map(|span| self.read(span)));
        let role = if into.area == Area::Scratch { 0 } else { self.target(&into.range) };
        let target = match role {
            0 => self.scratch(into.range.start),
            role => self.address(into.range.start, role),
        };
        let mut cuts: Vec<usize> = sources
            .iter()
            .flatten()
            .flat_map(|parts| parts.iter().map(|(start, _)| *start))
            .chain([0, count])
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let size = self.shape.size;
        let address = |source: &Option<Vec<(usize, Address)>>, at: usize| {
            source.as_ref().and_then(|parts| {
                let (start, address) = parts.iter().rev().find(|(start, _)| *start <= at)?;
                Some(Address { role: address.role, at: address.at + (at - start) * size })
            })
        };
        let parts = cuts
            .windows(2)
            .map(|cut| Part {
                offset: cut[0] * size,
                length: (cut[1] - cut[0]) * size,
                into: Address { role: target.role, at: target.at + cut[0] * size },
                reduce: address(&sources[0], cut[0]),
                with: address(&sources[1], cut[0]),
            })
            .collect();
        let mut outs = Vec::new();
        if role != 0 {
            self.roles.change(&into.range, |_| role);
            outs = self.outs_after(&into.range);
        }
        (parts, outs)
    }

    fn finish(&mut self, span: &Span) -> Work {
        if span.area == Area::Scratch {
            let ranges = vec![(self.scratch(span.range.start), span.range.len() * self.shape.size)];
            return Work::Finish { copies: Vec::new(), ranges, outs: Vec::new() };
        }
        let target = self.target(&span.range);
        let (mut copies, mut ranges) = (Vec::new(), Vec::new());
        for (part, roles) in self.roles.parts(&span.range) {
            let role = if roles & target != 0 {
                target
            } else if roles & STAGING != 0 {
                STAGING
            } else {
                copies.push(self.copy(&part, roles, target));
                target
            };
            self.roles.change(&part, |_| role);
            ranges.push((self.address(part.start, role), part.len() * self.shape.size));
        }
        let outs = self.outs_after(&span.range);
        Work::Finish { copies, ranges, outs }
    }

    /// Returns the copies of elements that this step wrote to Staging for the last time, and that the result
    /// needs.
    fn outs_after(&mut self, range: &Range<usize>) -> Vec<Copy> {
        let mut later = self.plan.steps[self.index + 1..].iter().filter_map(|step| writes(&step.action));
        if later.any(|span| overlaps(span, range)) {
            return Vec::new();
        }
        self.outs(range)
    }

    /// Returns the copies of elements of the result that are not in Out.
    fn outs(&mut self, range: &Range<usize>) -> Vec<Copy> {
        let wanted = intersection(&intersection(range, &self.shape.result), &self.shape.out);
        let mut copies = Vec::new();
        for (part, roles) in self.roles.parts(&wanted) {
            if roles & OUT == 0 {
                copies.push(self.copy(&part, roles, OUT));
                self.roles.change(&part, |roles| roles | OUT);
            }
        }
        copies
    }

    /// Returns the memory to which a step that writes `range` writes: Out or Staging.
    fn target(&self, range: &Range<usize>) -> MemoryRoles {
        let inside = self.shape.out.start <= range.start && range.end <= self.shape.out.end;
        let read = |action: &Action| match action {
            Action::Send { from, .. } => {
                from.range.len() * self.shape.size > self.shape.inline && overlaps(from, range)
            }
            _ => false,
        };
        let free =
            self.shape.registered || !self.plan.steps[self.index + 1..].iter().any(|step| read(&step.action));
        if inside && free { OUT } else { STAGING }
    }

    /// Returns the addresses of a span's elements: the first element of each part, counted from the span's
    /// start, and its address.
    fn read(&mut self, span: &Span) -> Vec<(usize, Address)> {
        if span.area == Area::Scratch {
            return vec![(0, self.scratch(span.range.start))];
        }
        let mut ranges = Vec::new();
        for (part, roles) in self.roles.parts(&span.range) {
            let address = self.address(part.start, roles);
            if address.role == MemoryRole::Staging {
                self.comes_after_staging(&part);
            }
            ranges.push((part.start - span.range.start, address));
        }
        ranges
    }

    fn copy(&mut self, part: &Range<usize>, roles: MemoryRoles, to: MemoryRoles) -> Copy {
        let length = part.len() * self.shape.size;
        self.copied += length;
        let from = self.address(part.start, roles);
        if from.role == MemoryRole::Staging {
            self.comes_after_staging(part);
        }
        Copy { from, to: self.address(part.start, to), length }
    }

    /// Returns the address of an element that is valid in `roles`.
    fn address(&mut self, element: usize, roles: MemoryRoles) -> Address {
        debug_assert!(roles != 0, "step {} reads elements that have no value", self.index);
        let size = self.shape.size;
        if roles & OUT != 0 {
            Address { role: MemoryRole::Out, at: element.saturating_sub(self.shape.out.start) * size }
        } else if roles & STAGING != 0 {
            self.stages = true;
            Address { role: MemoryRole::Staging, at: element * size }
        } else {
            let start = self.shape.input.as_ref().map_or(0, |input| input.start);
            Address { role: MemoryRole::Input, at: element.saturating_sub(start) * size }
        }
    }

    fn scratch(&self, element: usize) -> Address {
        Address { role: MemoryRole::Scratch, at: element * self.shape.size }
    }
}

fn overlaps(span: &Span, range: &Range<usize>) -> bool {
    span.area != Area::Scratch && span.range.start < range.end && range.start < span.range.end
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// A set of memories in which an element is valid.
pub(super) type MemoryRoles = u8;

pub(super) const INPUT: MemoryRoles = 1;
pub(super) const OUT: MemoryRoles = 2;
pub(super) const STAGING: MemoryRoles = 4;

/// The memories in which each element is valid, as ranges in order without gaps.
#[derive(Debug)]
pub(super) struct RoleMap {
    ranges: Vec<(Range<usize>, MemoryRoles)>,
}

impl RoleMap {
    /// Returns a map of `elements` elements that are valid nowhere.
    pub(super) fn new(elements: usize) -> Self {
        Self { ranges: vec![(0..elements, 0)] }
    }

    /// Returns the parts of `range` in order, and the memories in which each is valid.
    pub(super) fn parts(&self, range: &Range<usize>) -> Vec<(Range<usize>, MemoryRoles)> {
        let first = self.ranges.partition_point(|(part, _)| part.end <= range.start);
        self.ranges[first..]
            .iter()
            .take_while(|(part, _)| part.start < range.end)
            .map(|(part, roles)| (part.start.max(range.start)..part.end.min(range.end), *roles))
            .filter(|(part, _)| !part.is_empty())
            .collect()
    }

    /// Returns the memories in which all elements of `range` are valid.
    pub(super) fn common(&self, range: &Range<usize>) -> MemoryRoles {
        self.parts(range).iter().fold(!0, |all, (_, roles)| all & roles)
    }

    /// Changes for all elements of `range` in which memories they are valid.
    pub(super) fn change(&mut self, range: &Range<usize>, change: impl Fn(MemoryRoles) -> MemoryRoles) {
        if range.is_empty() {
            return;
        }
        let mut ranges: Vec<(Range<usize>, MemoryRoles)> = Vec::with_capacity(self.ranges.len() + 2);
        let mut push = |part: Range<usize>, roles: MemoryRoles| {
            if part.is_empty() {
                return;
            }
            match ranges.last_mut() {
                Some((last, same)) if *same == roles && last.end == part.start => last.end = part.end,
                _ => ranges.push((part, roles)),
            }
        };
        for (part, roles) in &self.ranges {
            push(part.start..part.end.min(range.start), *roles);
            let inside = part.start.max(range.start)..part.end.min(range.end);
            if !inside.is_empty() {
                push(inside, change(*roles));
            }
            push(part.start.max(range.end)..part.end, *roles);
        }
        self.ranges = ranges;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_splits_and_joins_ranges() {
        let mut map = RoleMap::new(10);
        map.change(&(2..5), |_| OUT);
        map.change(&(4..8), |roles| roles | STAGING);
        assert_eq!(
            map.parts(&(0..10)),
            [(0..2, 0), (2..4, OUT), (4..5, OUT | STAGING), (5..8, STAGING), (8..10, 0)]
        );
        assert_eq!(map.parts(&(3..6)), [(3..4, OUT), (4..5, OUT | STAGING), (5..6, STAGING)]);
        assert_eq!(map.common(&(2..5)), OUT);
        assert_eq!(map.common(&(2..6)), 0);
        map.change(&(0..10), |_| INPUT);
        assert_eq!(map.parts(&(0..10)), [(0..10, INPUT)]);
        map.change(&(3..3), |_| OUT);
        assert_eq!(map.parts(&(0..10)), [(0..10, INPUT)]);
    }
}
