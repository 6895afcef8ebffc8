//! How one tensor, the keys or the values of a layer, is stored.

use std::fmt;

use crate::sys;

/// Along which axis the elements of a group lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Axis {
    /// A group is one channel over consecutive tokens: what suits keys.
    Channel,
    /// A group is one token over consecutive channels: what suits values.
    Token,
}

/// How one tensor is stored: bits, groups, range, transform, rounding. Made by [`channel`](Spec::channel),
/// [`token`](Spec::token) or [`full`](Spec::full) and refined by the others; what does not go together is
/// refused when a cache is made of it.
///
/// ```
/// use kivi::Spec;
/// let keys = Spec::channel(3, 64).query_aware();
/// let values = Spec::token(2, Spec::GROUP_HEAD).hadamard();
/// assert_eq!((keys.bits(), values.group()), (3, Spec::GROUP_HEAD));
/// ```
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Spec(pub(crate) sys::kivi_spec);

impl Spec {
    /// On the token axis: one group spans the whole head dim.
    pub const GROUP_HEAD: i32 = sys::KIVI_GROUP_HEAD;

    /// `bits` (2, 3, 4 or 8) an element, a group is one channel over `group` (32, 64 or 128) tokens.
    pub fn channel(bits: i32, group: i32) -> Spec {
        Spec::packed(bits, sys::KIVI_AXIS_CHANNEL, group)
    }

    /// `bits` (2, 3, 4 or 8) an element, a group is one token over `group` channels: 32, 64, 128 or
    /// [`GROUP_HEAD`](Spec::GROUP_HEAD).
    pub fn token(bits: i32, group: i32) -> Spec {
        Spec::packed(bits, sys::KIVI_AXIS_TOKEN, group)
    }

    /// Not packed: every element in the window's type.
    pub fn full() -> Spec {
        Spec(sys::kivi_spec { bits: 16, ..Default::default() })
    }

    fn packed(bits: i32, axis: sys::kivi_axis, group: i32) -> Spec {
        Spec(sys::kivi_spec { bits, axis: axis as i32, group, ..Default::default() })
    }

    /// Rows are multiplied by an orthonormal Hadamard matrix over the head dim before they are stored;
    /// queries or outputs likewise, so results do not change but for the rounding.
    pub fn hadamard(mut self) -> Spec {
        self.0.transform = sys::KIVI_TRANSFORM_HADAMARD as i32;
        self
    }

    /// Codes of keys are chosen so that the error of the scores is small for the queries that come, once
    /// [moments](crate::Cache::moments_accumulate) are committed; until then they are the nearest.
    pub fn query_aware(mut self) -> Spec {
        self.0.rounding = sys::KIVI_ROUND_QUERY_AWARE as i32;
        self
    }

    /// The range of a group is its min-max range shrunk about its centre by `ratio`, above 0 and at most 1.
    pub fn range_ratio(mut self, ratio: f32) -> Spec {
        self.0.range = sys::KIVI_RANGE_RATIO as i32;
        self.0.range_ratio = ratio;
        self
    }

    /// Scale and min of a group are stored in 32 bits instead of 16.
    pub fn f32_params(mut self) -> Spec {
        self.0.param_dtype = sys::KIVI_F32 as i32;
        self
    }

    /// Bits an element: 2, 3, 4, 8, or 16 if not packed.
    pub fn bits(&self) -> i32 {
        self.0.bits
    }

    /// The axis of a group; `None` if not packed.
    pub fn axis(&self) -> Option<Axis> {
        match self.0.axis as u32 {
            sys::KIVI_AXIS_CHANNEL => Some(Axis::Channel),
            sys::KIVI_AXIS_TOKEN => Some(Axis::Token),
            _ => None,
        }
    }

    /// Elements of a group, or [`GROUP_HEAD`](Spec::GROUP_HEAD); 0 if not packed.
    pub fn group(&self) -> i32 {
        self.0.group
    }

    /// Whether rows are transformed before they are stored.
    pub fn has_hadamard(&self) -> bool {
        self.0.transform == sys::KIVI_TRANSFORM_HADAMARD as i32
    }

    /// Whether codes are chosen against moments.
    pub fn is_query_aware(&self) -> bool {
        self.0.rounding == sys::KIVI_ROUND_QUERY_AWARE as i32
    }
}

impl fmt::Debug for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spec")
            .field("bits", &self.0.bits)
            .field("axis", &self.axis())
            .field("group", &self.0.group)
            .field("range_ratio", &self.0.range_ratio)
            .field("param_dtype", &self.0.param_dtype)
            .field("hadamard", &self.has_hadamard())
            .field("query_aware", &self.is_query_aware())
            .finish()
    }
}
