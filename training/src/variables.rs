//! The variables of a training, as one process keeps them.
//!
//! The first node of a step gives out each variable's values ([`Variables::assign`]), and the last ones hand
//! in its gradients ([`Variables::push`]). The gradients are applied by the next step's first node. So all
//! gradients of a step are handed in, or the step is not complete, and what a step that fails has handed in
//! is dropped and changes no value.
//!
//! ```text
//!   version s ──► step s ──► gradients of step s ──► version s + 1
//! ```
//!
//! The values and velocities of the last version but one are kept too. Parameter servers differ by one version
//! at most, because a worker needs the values of all servers before it can compute gradients of the step. So
//! all can go back to the same version.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xxhash_rust::xxh3::Xxh3;

use crate::array::{Array, Block, Error};
use crate::network::{Values, Variable};

/// The gradient of a variable in a step: the sum of all parts, in this order.
#[derive(Clone, Debug)]
pub(crate) enum Gradient {
    /// The gradients of all elements, of each worker.
    Sum(Vec<Block<f32>>),
    /// Of each worker: the numbers of rows, and the gradient of each of these rows. Rows that are not named
    /// have none.
    Rows(Vec<(Block<u32>, Block<f32>)>),
}

/// All variables that a process keeps.
#[derive(Debug)]
pub(crate) struct Variables {
    rate: f32,
    momentum: f32,
    by_name: HashMap<String, Mutex<VariableState>>,
    /// The names, in the order in which the model has them.
    names: Vec<String>,
}

#[derive(Debug)]
struct VariableState {
    current: Version,
    previous: Option<Version>,
    /// The gradient of the step of the current version.
    pending: Option<Gradient>,
}

#[derive(Debug)]
struct Version {
    number: u64,
    values: Block<f32>,
    velocities: Vec<f32>,
}

impl Variables {
    /// Makes a version, the one that step `number` begins with.
    pub(crate) fn new(
        variables: Vec<Variable>,
        rate: f32,
        momentum: f32,
        number: u64,
    ) -> Result<Arc<Self>, Error> {
        let names = variables.iter().map(|variable| variable.name.clone()).collect();
        let mut by_name = HashMap::new();
        for Variable { name, dims, values, velocities } in variables {
            let current = Version { number, values: Block::new(&dims, values)?, velocities };
            by_name.insert(name, Mutex::new(VariableState { current, previous: None, pending: None }));
        }
        Ok(Arc::new(Self { rate, momentum, by_name, names }))
    }

    fn state(&self, name: &str) -> Result<MutexGuard<'_, VariableState>, Error> {
        let state = self.by_name.get(name).ok_or_else(|| format!("there is no variable {name}"))?;
        Ok(state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the values of the version of `step`, in memory that is allocated here. Applies the gradient of
    /// the step before.
    pub(crate) fn assign(&self, name: &str, step: u64) -> Result<Array, Error> {
        let mut state = self.state(name)?;
        let found = state.current.number;
        if found + 1 == step {
            self.apply(name, &mut state)?;
        } else if found == step {
            // The first step, or a step that is done again.
            let copy = state.current.values.values().to_vec();
            state.current.values = Block::new(state.current.values.dims(), copy)?;
        } else {
            return Err(
                format!("variable {name} has version {found}, and step {step} needs version {step}").into()
            );
        }
        Ok(Array::Floats(state.current.values.clone()))
    }

    /// Takes the gradient of a step.
    pub(crate) fn push(&self, name: &str, step: u64, gradient: Gradient) -> Result<(), Error> {
        let mut state = self.state(name)?;
        let (length, found) = (state.current.values.values().len(), state.current.number);
        if !gradient.fits(length, columns(&state.current.values)) {
            return Err(format!("a gradient of variable {name} does not fit its {length} elements").into());
        }
        if found != step || state.pending.is_some() {
            return Err(format!(
                "variable {name} has version {found}, and gets another gradient of step {step}"
            )
            .into());
        }
        state.pending = Some(gradient);
        Ok(())
    }

    /// Computes the next version from the pending gradient: `velocity = momentum · velocity + gradient`, then
    /// `value −= rate · velocity` (Polyak 1964).
    fn apply(&self, name: &str, state: &mut VariableState) -> Result<(), Error> {
        let old = &state.current;
        let gradient = state.pending.take();
        let gradient =
            gradient.ok_or_else(|| format!("variable {name} has no gradient of step {}", old.number))?;
        let mut values = old.values.values().to_vec();
        // The memory of the oldest velocities is used again.
        let mut velocities = match state.previous.take() {
            Some(mut previous) => {
                previous.velocities.copy_from_slice(&old.velocities);
                previous.velocities
            }
            None => old.velocities.clone(),
        };
        let (length, columns) = (values.len(), columns(&old.values));
        let to = (values.as_mut_slice(), velocities.as_mut_slice());
        match &gradient {
            Gradient::Sum(parts) => match parts.as_slice() {
                // The gradients of two workers are read once.
                [one, two] => {
                    self.update(to, one.values().iter().zip(two.values()).map(|(one, two)| one + two));
                }
                parts => self.update(to, sum(parts).into_iter()),
            },
            Gradient::Rows(workers) => self.update(to, sum_of_rows(workers, length, columns).into_iter()),
        }
        let values = Block::new(old.values.dims(), values)?;
        let next = Version { number: old.number + 1, values, velocities };
        state.previous = Some(std::mem::replace(&mut state.current, next));
        Ok(())
    }

    fn update(&self, (values, velocities): (&mut [f32], &mut [f32]), gradients: impl Iterator<Item = f32>) {
        for ((value, velocity), gradient) in values.iter_mut().zip(velocities).zip(gradients) {
            *velocity = self.momentum * *velocity + gradient;
            *value -= self.rate * *velocity;
        }
    }

    /// Returns the number of steps of which all variables have all gradients.
    pub(crate) fn complete(&self) -> Result<u64, Error> {
        let of = |name: &String| {
            let state = self.state(name)?;
            Ok(state.current.number + u64::from(state.pending.is_some()))
        };
        let complete = self.names.iter().map(of).collect::<Result<Vec<_>, Error>>()?;
        Ok(complete.into_iter().min().unwrap_or(0))
    }

    /// Makes all variables have the same version, which later steps begin with.
    pub(crate) fn settle(&self, version: u64) -> Result<(), Error> {
        for name in &self.names {
            let mut state = self.state(name)?;
            if state.current.number == version + 1
                && let Some(previous) = state.previous.take()
            {
                state.current = previous;
            } else if state.current.number + 1 == version {
                self.apply(name, &mut state)?;
            }
            state.pending = None;
            let found = state.current.number;
            if found != version {
                let reason = format!("has version {found}, and can't be set to version {version}");
                return Err(format!("variable {name} {reason}").into());
            }
        }
        Ok(())
    }

    /// Returns names and values, in the order of the model.
    pub(crate) fn values(&self) -> Result<Values, Error> {
        self.names.iter().map(|name| Ok((name.clone(), self.state(name)?.current.values.clone()))).collect()
    }

    /// Returns a variable of the current version.
    pub(crate) fn get(&self, name: &str) -> Result<Variable, Error> {
        let Version { values, velocities, .. } = &self.state(name)?.current;
        let (dims, values) = (values.dims().to_vec(), values.values().to_vec());
        Ok(Variable { name: name.to_owned(), dims, values, velocities: velocities.clone() })
    }

    /// Changes elements of a variable of the current version, those of the values from `from` on, or those of
    /// the velocities.
    pub(crate) fn set(&self, name: &str, velocities: bool, from: usize, with: &[f32]) -> Result<(), Error> {
        let current = &mut self.state(name)?.current;
        let all = if velocities { current.velocities.as_mut_slice() } else { current.values.values_mut() };
        let range = from..from.saturating_add(with.len());
        let elements = all.get_mut(range.clone());
        let elements = elements.ok_or_else(|| format!("variable {name} has no elements {range:?}"))?;
        elements.copy_from_slice(with);
        Ok(())
    }

    /// Returns a hash of the bits of all values.
    pub(crate) fn hash(&self) -> Result<u64, Error> {
        Ok(hash(&self.values()?))
    }
}

/// Returns a hash of the names and of the bits of all values.
pub(crate) fn hash(variables: &Values) -> u64 {
    let mut hash = Xxh3::new();
    for (name, values) in variables {
        hash.update(name.as_bytes());
        hash.update(bytemuck::cast_slice(values.values()));
    }
    hash.digest()
}

fn columns(values: &Block<f32>) -> usize {
    values.dims().last().copied().unwrap_or(1).max(1)
}

/// Adds the gradients of all workers up, in their order.
fn sum(parts: &[Block<f32>]) -> Vec<f32> {
    let mut parts = parts.iter();
    let mut sum = parts.next().map_or_else(Vec::new, |first| first.values().to_vec());
    for part in parts {
        sum.iter_mut().zip(part.values()).for_each(|(sum, gradient)| *sum += gradient);
    }
    sum
}

/// Adds the gradients of rows up, in the order of the workers and of their rows.
pub(crate) fn sum_of_rows(workers: &[(Block<u32>, Block<f32>)], length: usize, columns: usize) -> Vec<f32> {
    let mut sum = vec![0.0; length];
    for (rows, gradients) in workers {
        for (row, gradient) in rows.values().iter().zip(gradients.values().chunks_exact(columns)) {
            let from = *row as usize * columns;
            let target = sum.get_mut(from..from + columns).unwrap_or(&mut []);
            target.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        }
    }
    sum
}

impl Gradient {
    /// Returns whether the gradient fits a variable, so that nothing is left out when it is applied.
    fn fits(&self, length: usize, columns: usize) -> bool {
        match self {
            Self::Sum(parts) => !parts.is_empty() && parts.iter().all(|part| part.values().len() == length),
            Self::Rows(workers) => workers.iter().all(|(rows, gradients)| {
                rows.values().len() * columns == gradients.values().len()
                    && rows.values().iter().all(|row| (*row as usize) < length / columns)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Arc<Variables> {
        let variable = |name: &str, dims: &[usize]| Variable {
            name: name.to_owned(),
            dims: dims.to_vec(),
            values: (0..dims.iter().product::<usize>()).map(|value| value as f32).collect(),
            velocities: vec![0.0; dims.iter().product()],
        };
        Variables::new(vec![variable("a", &[4]), variable("table", &[3, 2])], 0.5, 0.5, 0).unwrap()
    }

    fn block(values: &[f32]) -> Block<f32> {
        Block::new(&[values.len()], values.to_vec()).unwrap()
    }

    fn words(values: &[u32]) -> Block<u32> {
        Block::new(&[values.len()], values.to_vec()).unwrap()
    }

    fn sum(parts: &[&[f32]]) -> Gradient {
        Gradient::Sum(parts.iter().map(|part| block(part)).collect())
    }

    fn values(variables: &Variables, index: usize) -> Vec<f32> {
        variables.values().unwrap()[index].1.values().to_vec()
    }

    /// Runs a step whose gradients are all 1.
    fn step(variables: &Variables, step: u64) {
        variables.assign("a", step).unwrap();
        variables.assign("table", step).unwrap();
        variables.push("a", step, sum(&[&[1.0; 4]])).unwrap();
        let rows = vec![(words(&[0, 1, 2]), block(&[1.0; 6]))];
        variables.push("table", step, Gradient::Rows(rows)).unwrap();
    }

    #[test]
    fn a_gradient_is_applied_by_the_next_step() {
        let variables = variables();
        step(&variables, 0);
        assert_eq!(values(&variables, 0), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(variables.complete().unwrap(), 1);
        let assigned = variables.assign("a", 1).unwrap();
        assert_eq!(assigned.as_floats().unwrap().values(), [-0.5, 0.5, 1.5, 2.5]);
        // The velocity is 0.5 · 1 + 1.
        variables.push("a", 1, sum(&[&[1.0; 4]])).unwrap();
        variables.assign("a", 2).unwrap();
        assert_eq!(values(&variables, 0), [-1.25, -0.25, 0.75, 1.75]);
    }

    #[test]
    fn sums_of_two_workers_of_more_and_of_rows_are_right() {
        let results = [
            sum(&[&[1.0, 2.0, 3.0, 4.0], &[0.5; 4]]),
            sum(&[&[1.0, 2.0, 3.0, 4.0], &[0.25; 4], &[0.25; 4]]),
            sum(&[&[1.5, 2.5, 3.5, 4.5]]),
        ]
        .map(|gradient| {
            let variables = variables();
            variables.assign("a", 0).unwrap();
            variables.push("a", 0, gradient).unwrap();
            variables.assign("a", 1).unwrap();
            values(&variables, 0)
        });
        assert_eq!(results[0], [-0.75, -0.25, 0.25, 0.75]);
        assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
        let variables = variables();
        let rows = vec![
            (words(&[2, 0, 2]), block(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
            (words(&[2]), block(&[10.0, 10.0])),
        ];
        variables.push("table", 0, Gradient::Rows(rows)).unwrap();
        variables.assign("table", 1).unwrap();
        assert_eq!(values(&variables, 1), [-1.5, -1.0, 2.0, 3.0, -4.0, -4.0]);
    }

    #[test]
    fn a_step_that_fails_leaves_no_trace() {
        // What one process has seen when a step fails: nothing of it, or a gradient of one variable, or all
        // of it, or the next step too.
        for (seen, complete) in [(0, 2), (1, 2), (2, 3), (3, 3)] {
            let variables = variables();
            step(&variables, 0);
            step(&variables, 1);
            let expected = variables.clone();
            if seen >= 1 {
                variables.assign("a", 2).unwrap();
                variables.push("a", 2, sum(&[&[9.0; 4]])).unwrap();
            }
            if seen >= 2 {
                variables.assign("table", 2).unwrap();
                variables.push("table", 2, Gradient::Rows(Vec::new())).unwrap();
            }
            if seen >= 3 {
                variables.assign("a", 3).unwrap();
            }
            assert_eq!(expected.complete().unwrap(), complete, "{seen}");
            variables.settle(2).unwrap();
            assert_eq!(values(&variables, 0), [-1.25, -0.25, 0.75, 1.75], "{seen}");
            step(&variables, 2);
            variables.settle(3).unwrap();
            // The velocity is 0.5 · 1.5 + 1.
            assert_eq!(values(&variables, 0), [-2.125, -1.125, -0.125, 0.875], "{seen}");
        }
    }

    #[test]
    fn variables_that_are_written_elsewhere_go_on_alike() {
        let all = variables();
        step(&all, 0);
        all.settle(1).unwrap();
        let got = ["a", "table"].map(|name| all.get(name).unwrap());
        let fresh = |variable: &Variable| Variable {
            values: vec![9.0; variable.values.len()],
            velocities: vec![9.0; variable.values.len()],
            ..variable.clone()
        };
        let other = Variables::new(got.iter().map(fresh).collect(), 0.5, 0.5, 1).unwrap();
        for Variable { name, values, velocities, .. } in &got {
            other.set(name, false, 0, &values[..1]).unwrap();
            other.set(name, false, 1, &values[1..]).unwrap();
            other.set(name, true, 0, velocities).unwrap();
        }
        assert!(other.set("a", true, 3, &[0.0; 2]).unwrap_err().to_string().contains("no elements 3..5"));
        for variables in [&all, &other] {
            step(variables, 1);
            variables.settle(2).unwrap();
        }
        assert_eq!(
            ["a", "table"].map(|name| other.get(name).unwrap()),
            ["a", "table"].map(|name| all.get(name).unwrap())
        );
    }

    #[test]
    fn a_gradient_that_does_not_fit_is_refused() {
        let variables = variables();
        for (name, gradient) in [
            ("a", sum(&[&[1.0; 3]])),
            ("a", sum(&[])),
            ("table", Gradient::Rows(vec![(words(&[3]), block(&[1.0; 2]))])),
            ("table", Gradient::Rows(vec![(words(&[0]), block(&[1.0; 3]))])),
        ] {
            let error = variables.push(name, 0, gradient).unwrap_err().to_string();
            assert!(error.contains(&format!("variable {name} does not fit")), "{error}");
        }
        assert!(variables.assign("b", 0).unwrap_err().to_string().contains("no variable b"));
        assert!(variables.assign("a", 2).unwrap_err().to_string().contains("version 0, and step 2"));
        assert!(variables.assign("a", 1).unwrap_err().to_string().contains("no gradient of step 0"));
        variables.push("a", 0, sum(&[&[1.0; 4]])).unwrap();
        let again = variables.push("a", 0, sum(&[&[1.0; 4]])).unwrap_err().to_string();
        assert!(again.contains("another gradient of step 0"), "{again}");
    }
}
