//! Runs one behaviour over the columns, and compares its outcomes with what is declared.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;

use support::Runtime;

use crate::column::Column;
use crate::differences::{self, Declared};

/// A behaviour's function.
pub(crate) type Body = fn(Column) -> Pin<Box<dyn Future<Output = String>>>;

/// A behaviour, and its outcome over stock TCP, which is the outcome over all columns unless a difference is
/// declared.
#[derive(Clone, Copy)]
pub(crate) struct Behaviour {
    /// The name of the group, and that of the behaviour in it.
    pub(crate) name: &'static str,
    pub(crate) outcome: &'static str,
    pub(crate) body: Body,
}

/// Behaviours about one thing.
pub(crate) struct Group {
    pub(crate) title: &'static str,
    pub(crate) behaviours: &'static [Behaviour],
}

/// Runs `behaviour` over all columns. Fails with one line for each outcome that is not as declared.
pub(crate) fn check(behaviour: &Behaviour) {
    let mut wrong = Vec::new();
    for column in Column::ALL {
        let declared = differences::find(behaviour.name, column).map(|difference| difference.outcome);
        let expected = match declared {
            Some(Declared::NotRun) => continue,
            Some(Declared::Outcome(outcome)) => outcome,
            None => behaviour.outcome,
        };
        for runtime in runtimes(column) {
            let outcome = catch_unwind(AssertUnwindSafe(|| runtime.run((behaviour.body)(column))));
            let place = format!("{} in {runtime:?}", column.heading());
            match outcome {
                Ok(outcome) if outcome == expected => {}
                Ok(outcome) if declared.is_some() && outcome == behaviour.outcome => {
                    wrong.push(format!("{place}: no longer differs; take the difference out"));
                }
                Ok(outcome) => wrong.push(format!("{place}: {outcome:?} in place of {expected:?}")),
                Err(panic) => wrong.push(format!("{place}: panicked: {}", text_of(&*panic))),
            }
        }
    }
    assert!(wrong.is_empty(), "{}:\n  {}", behaviour.name, wrong.join("\n  "));
}

/// Returns the kinds of runtime in which a column's behaviours run.
fn runtimes(column: Column) -> &'static [Runtime] {
    match column {
        Column::Tcp => &[Runtime::CurrentThread],
        Column::DropIn => &[Runtime::Idle],
        Column::Native | Column::InProcess => &[Runtime::Idle, Runtime::MultiThread],
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a text");
    text.chars().take(1000).collect()
}
