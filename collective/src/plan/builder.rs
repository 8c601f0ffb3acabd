//! Collects the steps of a plan, and finds which earlier steps each of them must wait for.

use std::collections::BTreeMap;
use std::ops::Range;

use super::step::{Action, Area, Arguments, Collective, Hosts, Plan, Span, Step, part};

/// The largest number of chunks of a whole, so that a plan has an upper bound.
const MOST_CHUNKS: usize = 1 << 12;

/// A plan under construction.
#[derive(Debug)]
pub(super) struct Builder {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) elements: usize,
    /// The largest number of elements of a message that is done at once; see [`Arguments::inline`].
    pub(super) inline: usize,
    pub(super) hosts: Hosts,
    collective: Collective,
    chunk: usize,
    scratch: usize,
    steps: Vec<Step>,
    dependencies: Dependencies,
}

impl Builder {
    pub(super) fn new(arguments: &Arguments, rank: usize) -> Self {
        Self {
            rank,
            ranks: arguments.ranks,
            elements: arguments.elements,
            inline: arguments.inline,
            hosts: arguments.hosts.clone(),
            collective: arguments.collective,
            chunk: arguments
                .chunk
                .max(arguments.elements.div_ceil(MOST_CHUNKS))
                .clamp(1, arguments.elements.max(1)),
            scratch: 0,
            steps: Vec::new(),
            dependencies: Dependencies::default(),
        }
    }

    pub(super) fn plan(self) -> Plan {
        Plan { steps: self.steps, scratch: self.scratch }
    }

    /// Returns the part of a rank. Ranks beyond the last one count from 0 again.
    pub(super) fn part(&self, rank: usize) -> Range<usize> {
        part(self.elements, self.ranks, rank % self.ranks)
    }

    /// Returns the rank `distance` ranks behind this one in the ring of ranks. `distance` is at most the
    /// number of ranks.
    pub(super) fn behind(&self, distance: usize) -> usize {
        (self.rank + self.ranks - distance) % self.ranks
    }

    /// Returns the rank `distance` ranks ahead of this one in the ring of ranks.
    pub(super) fn ahead(&self, distance: usize) -> usize {
        (self.rank + distance) % self.ranks
    }

    /// Divides a range into chunks for one message each. An empty range has no chunk. Sender and receiver of
    /// a message call it with ranges of the same length.
    pub(super) fn chunks(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (chunk, end) = (self.chunk, range.end);
        range.step_by(chunk).map(move |start| start..end.min(start + chunk))
    }

    /// Reserves scratch memory: the elements from 0 to `elements`.
    pub(super) fn reserve(&mut self, elements: usize) {
        self.scratch = self.scratch.max(elements);
    }

    /// Sends elements, as one message. Returns the index of the step.
    pub(super) fn send(&mut self, to: usize, from: Span) -> u32 {
        self.push(Action::Send { to, from }, &[])
    }

    /// Receives one message. Returns the index of the step.
    pub(super) fn receive(&mut self, from: usize, into: Span, reduce: Option<Span>) -> u32 {
        self.push(Action::Receive { from, into, reduce }, &[])
    }

    /// Sends a range of Work, one message for each chunk.
    pub(super) fn send_chunks(&mut self, to: usize, range: Range<usize>) {
        for chunk in self.chunks(range) {
            self.send(to, Span::work(chunk));
        }
    }

    /// Receives a range of Work, one message for each chunk.
    pub(super) fn receive_chunks(&mut self, from: usize, range: Range<usize>) {
        for chunk in self.chunks(range) {
            self.receive(from, Span::work(chunk), None);
        }
    }

    /// Receives a range of Work of each of these ranks, in this order, and reduces it.
    pub(super) fn reduce_chunks(&mut self, from: &[usize], range: Range<usize>) {
        for chunk in self.chunks(range) {
            for from in from {
                self.receive(*from, Span::work(chunk.clone()), Some(Span::work(chunk.clone())));
            }
        }
    }

    /// Marks a range of Work as final, chunk by chunk.
    pub(super) fn finish_chunks(&mut self, range: Range<usize>) {
        for chunk in self.chunks(range) {
            self.finish(Span::work(chunk));
        }
    }

    /// Reduces within this rank.
    pub(super) fn local(&mut self, with: Span, into: Span, reduce: Span) {
        self.push(Action::Local { with, into, reduce }, &[]);
    }

    /// Marks elements as final, before they are sent on.
    pub(super) fn finish(&mut self, span: Span) {
        self.push(Action::Finish { span }, &[]);
    }

    /// Adds a step that also waits for the steps `also`, with which it shares no elements.
    pub(super) fn push(&mut self, action: Action, also: &[u32]) -> u32 {
        let step = self.steps.len() as u32;
        let after = self.dependencies.add(step, &action, also, &self.steps);
        self.steps.push(Step { action, after });
        step
    }

    /// Makes the plan of a group of one rank: the result is what the rank gives.
    pub(super) fn alone(&mut self) {
        if matches!(self.collective, Collective::AllReduce | Collective::ReduceScatter) {
            self.finish_chunks(0..self.elements);
        }
    }
}

impl Span {
    pub(super) fn work(range: Range<usize>) -> Self {
        Self { area: Area::Work, range }
    }

    pub(super) fn scratch(range: Range<usize>) -> Self {
        Self { area: Area::Scratch, range }
    }
}

/// The largest number of dependencies of a step for which indirect ones are removed.
const MOST_PRUNED: usize = 8;

/// The steps so far, by the elements that they read and write. Finds for each new step the earlier steps that
/// it must wait for.
///
/// ```text
///   read after write    the value must be there
///   write after read    the value must not be needed any more; a Send reads until its message is taken
///   write after write   the later value must stay
/// ```
///
/// Each area is a map of segments that do not overlap. A segment knows its last writer and the readers
/// since then. A step splits at most two segments for each of its spans, so all steps together take time
/// proportional to their number, times its logarithm.
#[derive(Debug, Default)]
pub(super) struct Dependencies {
    work: AreaSegments,
    scratch: AreaSegments,
}

/// The segments of one area, by their first element.
#[derive(Debug, Default)]
struct AreaSegments(BTreeMap<usize, Segment>);

/// Elements that the same steps have read and written.
#[derive(Clone, Debug, Default)]
struct Segment {
    end: usize,
    writer: Option<u32>,
    /// The readers since the last writer.
    readers: Vec<u32>,
}

impl Dependencies {
    /// Adds the step with this index. Returns the steps that it must wait for, in order: those that its
    /// elements demand, and the steps `also`. `steps` are the earlier steps.
    pub(super) fn add(&mut self, step: u32, action: &Action, also: &[u32], steps: &[Step]) -> Vec<u32> {
        let mut after = also.to_vec();
        for span in reads(action).into_iter().flatten() {
            self.segments(span.area).read(step, &span.range, &mut after);
        }
        if let Some(span) = writes(action) {
            self.segments(span.area).write(step, &span.range, &mut after);
        }
        after.sort_unstable();
        after.dedup();
        without_indirect(after, steps)
    }

    fn segments(&mut self, area: Area) -> &mut AreaSegments {
        match area {
            Area::Work => &mut self.work,
            Area::Scratch => &mut self.scratch,
        }
    }
}

/// Returns the elements that a step reads.
pub(super) fn reads(action: &Action) -> [Option<&Span>; 2] {
    match action {
        Action::Send { from, .. } => [Some(from), None],
        Action::Receive { reduce, .. } => [reduce.as_ref(), None],
        Action::Local { with, reduce, .. } => [Some(with), Some(reduce)],
        Action::Finish { span } => [Some(span), None],
    }
}

/// Returns the elements that a step writes.
pub(crate) fn writes(action: &Action) -> Option<&Span> {
    match action {
        Action::Send { .. } => None,
        Action::Receive { into, .. } | Action::Local { into, .. } => Some(into),
        Action::Finish { span } => Some(span),
    }
}

/// Leaves out steps that another step of `after` waits for itself.
fn without_indirect(after: Vec<u32>, steps: &[Step]) -> Vec<u32> {
    if after.len() > MOST_PRUNED {
        return after;
    }
    let is_indirect =
        |earlier: &u32| after.iter().any(|later| steps[*later as usize].after.binary_search(earlier).is_ok());
    after.iter().copied().filter(|earlier| !is_indirect(earlier)).collect()
}

impl AreaSegments {
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
