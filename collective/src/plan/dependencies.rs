//! Finds for each step the earlier steps that it must wait for, from the elements that the steps read and write.
//!
//! ```text
//!   read after write    the value must be there
//!   write after read    the value must not be needed any more; a Send reads until its message is taken
//!   write after write   the later value must stay
//! ```
//!
//! Each memory is a map of segments that do not overlap. A segment knows its last writer and the readers since then. A step splits
//! at most two segments for each of its spans, so all steps together take time proportional to their number, times its logarithm.

use std::collections::BTreeMap;
use std::ops::Range;

use super::step::{Action, Area, Span, Step};

/// The largest number of dependencies of a step for which indirect ones are looked for.
const FEW: usize = 8;

/// The steps so far, by the elements that they read and write.
#[derive(Debug)]
pub(super) struct Dependencies {
    in_place: bool,
    input: Memory,
    work: Memory,
    scratch: Memory,
}

/// Segments by their first element.
#[derive(Debug, Default)]
struct Memory(BTreeMap<usize, Segment>);

/// Elements that the same steps have read and written.
#[derive(Clone, Debug, Default)]
struct Segment {
    end: usize,
    writer: Option<u32>,
    /// The readers since the last writer.
    readers: Vec<u32>,
}

impl Dependencies {
    pub(super) fn new(in_place: bool) -> Self {
        Self { in_place, input: Memory::default(), work: Memory::default(), scratch: Memory::default() }
    }

    /// Adds the step with this index. Returns the steps that it must wait for, in order: those that its elements demand, and the
    /// steps `also`. `steps` are the earlier steps.
    pub(super) fn add(&mut self, step: u32, action: &Action, also: &[u32], steps: &[Step]) -> Vec<u32> {
        let mut after = also.to_vec();
        for span in reads(action).into_iter().flatten() {
            self.memory(span.area).read(step, &span.range, &mut after);
        }
        if let Some(span) = writes(action) {
            self.memory(span.area).write(step, &span.range, &mut after);
        }
        after.sort_unstable();
        after.dedup();
        without_indirect(after, steps)
    }

    fn memory(&mut self, area: Area) -> &mut Memory {
        match area {
            Area::Input if !self.in_place => &mut self.input,
            Area::Input | Area::Work => &mut self.work,
            Area::Scratch => &mut self.scratch,
        }
    }
}

/// Returns the elements that a step reads.
pub(super) fn reads(action: &Action) -> [Option<&Span>; 2] {
    match action {
        Action::Send { from, .. } => [Some(from), None],
        Action::Receive { reduce, .. } => [reduce.as_ref(), None],
        Action::Local { with, reduce, .. } => [Some(with), reduce.as_ref()],
        Action::Finish { span } => [Some(span), None],
    }
}

/// Returns the elements that a step writes.
pub(super) fn writes(action: &Action) -> Option<&Span> {
    match action {
        Action::Send { .. } => None,
        Action::Receive { into, .. } | Action::Local { into, .. } => Some(into),
        Action::Finish { span } => Some(span),
    }
}

/// Leaves out steps that another step of `after` waits for itself.
fn without_indirect(after: Vec<u32>, steps: &[Step]) -> Vec<u32> {
    if after.len() > FEW {
        return after;
    }
    let is_indirect =
        |earlier: &u32| after.iter().any(|later| steps[*later as usize].after.binary_search(earlier).is_ok());
    after.iter().copied().filter(|earlier| !is_indirect(earlier)).collect()
}

impl Memory {
    fn read(&mut self, step: u32, range: &Range<usize>, after: &mut Vec<u32>) {
        self.cover(range);
        for segment in self.0.range_mut(range.clone()).map(|(_, segment)| segment) {
            after.extend(segment.writer);
            segment.readers.push(step);
        }
    }

    fn write(&mut self, step: u32, range: &Range<usize>, after: &mut Vec<u32>) {
        self.cover(range);
        let starts: Vec<usize> = self.0.range(range.clone()).map(|(start, _)| *start).collect();
        for start in starts {
            let Some(segment) = self.0.remove(&start) else { continue };
            // Readers have waited for the writer, so one of both is enough.
            let before = after.len();
            after.extend(segment.readers.iter().filter(|reader| **reader != step));
            if after.len() == before {
                after.extend(segment.writer);
            }
        }
        if !range.is_empty() {
            self.0.insert(range.start, Segment { end: range.end, writer: Some(step), readers: Vec::new() });
        }
    }

    /// Splits segments at both ends of the range, and fills its gaps with segments that no step has used.
    fn cover(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        self.split(range.start);
        self.split(range.end);
        let mut gaps = Vec::new();
        let mut next = range.start;
        for (start, segment) in self.0.range(range.clone()) {
            if next < *start {
                gaps.push(next..*start);
            }
            next = segment.end;
        }
        if next < range.end {
            gaps.push(next..range.end);
        }
        for gap in gaps {
            self.0.insert(gap.start, Segment { end: gap.end, ..Segment::default() });
        }
    }

    /// Splits the segment in whose middle `at` lies.
    fn split(&mut self, at: usize) {
        let Some((_, segment)) = self.0.range_mut(..at).next_back() else { return };
        if segment.end > at {
            let rest = segment.clone();
            segment.end = at;
            self.0.insert(at, rest);
        }
    }
}
