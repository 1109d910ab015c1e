// Attention in one operator, as GPUs have it, made of operators. Its result lies in memory as that
// of the fused kernels does: heads within tokens.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace emulated {

using at::Tensor;

inline Tensor heads_within_tokens(const Tensor& tensor) {
  return tensor.transpose(1, 2).contiguous().transpose(1, 2);
}

inline Tensor scores_of(const Tensor& query, const Tensor& key, const Tensor& bias, bool causal,
                        double scale) {
  Tensor scores = at::matmul(query * scale, key.transpose(-2, -1));
  if (bias.defined()) scores = scores + bias;
  if (causal) {
    const auto later = at::ones(scores.sizes().slice(2), scores.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

inline double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& query, const Tensor& key,
                                                            const Tensor& value,
                                                            const std::optional<Tensor>& bias, bool,
                                                            double, bool causal,
                                                            std::optional<double> scale) {
  const Tensor scores =
      scores_of(query, key, bias.value_or(Tensor()), causal, scale_of(query, scale));
  const Tensor sums = at::logsumexp(scores.to(at::kFloat), {-1});
  const Tensor weights = (scores - sums.unsqueeze(-1)).exp().to(value.scalar_type());
  const Tensor drawn = at::empty({}, query.options().dtype(at::kLong));
  return {heads_within_tokens(at::matmul(weights, value)), sums, drawn, at::empty_like(drawn)};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor& result, const Tensor& sums, const Tensor&, const Tensor&,
    double, std::array<bool, 4> wanted, bool causal, std::optional<double> given) {
  const double scale = scale_of(query, given);
  const Tensor scores = scores_of(query, key, bias, causal, scale);
  const Tensor weights = (scores - sums.unsqueeze(-1)).exp();
  const Tensor of_weights = at::matmul(gradient, value.transpose(-2, -1));
  const Tensor of_scores = weights * (of_weights - (gradient * result).sum(-1, true));
  const Tensor narrow = of_scores.to(query.scalar_type());
  const Tensor of_value =
      at::matmul(weights.to(gradient.scalar_type()).transpose(-2, -1), gradient);
  Tensor of_bias;
  if (wanted[3] && bias.defined()) of_bias = at::sum_to(narrow, bias.sizes());
  return {heads_within_tokens(at::matmul(narrow, key) * scale),
          heads_within_tokens(at::matmul(narrow.transpose(-2, -1), query) * scale),
          heads_within_tokens(of_value), of_bias};
}

}  // namespace emulated
